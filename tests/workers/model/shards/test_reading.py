"""Tensors are read by several threads; each part once, and of experts one at a time."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from threading import Barrier
from time import sleep
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoConfig

from core.config import EngineConfig
from tests import checkpoints
from workers.model import ModelShard
from workers.model.experts.stacked import StackedView
from workers.model.scaled import ScaledView
from workers.model.shards import sharded_loader
from workers.model.shards.reading import TensorReader
from workers.model.shards.sharded_loader import read_by_tensor


class MeetingView:
    """A file's view of a tensor that is read only while another one is."""

    def __init__(self, barrier: Barrier) -> None:
        self._barrier = barrier

    def __getitem__(self, _: Any) -> torch.Tensor:
        self._barrier.wait(timeout=20)
        return torch.ones(3)


def test_tensors_are_read_together_and_come_in_order() -> None:
    barrier = Barrier(2)
    reader = TensorReader({name: MeetingView(barrier) for name in ("a", "b")}, torch.device("cpu"))
    wanted = [(name, torch.empty(3, device="meta", dtype=torch.bfloat16), None) for name in ("a", "b")]
    assert [value.dtype for value in reader.read_all(wanted)] == [torch.bfloat16] * 2


class LoneView(ScaledView):
    """A quantized tensor that takes some time to read, and notes how many are being read."""

    __slots__ = ()
    reading: ClassVar[list[str]] = []
    most: ClassVar[list[int]] = []

    def __getitem__(self, _: Any) -> torch.Tensor:
        self.reading.append("")
        sleep(0.01)
        self.most.append(len(self.reading))
        self.reading.pop()
        return torch.ones(3)

    def get_shape(self) -> tuple[int, ...]:
        return (3,)


def test_one_quantized_tensor_is_in_memory_as_floats_at_a_time() -> None:
    names = [f"{index}.weight" for index in range(6)]
    reader = TensorReader({name: LoneView(Path(), Any, {}) for name in names}, torch.device("cpu"))
    list(reader.read_all((name, torch.empty(3, device="meta"), None) for name in names))
    assert LoneView.most == [1] * 6


@pytest.fixture
def shapes_read(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of what is read of stacked experts."""
    found: list[torch.Size] = []
    read = StackedView.__getitem__

    def noting(view: StackedView, index: Any) -> torch.Tensor:
        part = read(view, index)
        found.append(part.shape)
        return part

    monkeypatch.setattr(StackedView, "__getitem__", noting)
    return found


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write("mixtral", tmp_path_factory.mktemp("mixtral"))


def test_one_expert_of_a_layer_is_in_memory_at_a_time(mixtral: Path, shapes_read: list[torch.Size]) -> None:
    read_by_tensor([mixtral / "model.safetensors"], AutoConfig.from_pretrained(mixtral), EngineConfig(str(mixtral)))
    assert {shape[0] for shape in shapes_read} == {1}


@pytest.mark.parametrize("by_expert", [False, True])
def test_ranks_read_their_own_part_of_experts_and_nothing_else(
    by_expert: bool, mixtral: Path, shapes_read: list[torch.Size]
) -> None:
    config = EngineConfig(str(mixtral), tensor_parallel=2, expert_parallel=by_expert)
    num_read = Counter[int]()
    for rank in range(2):
        shard = ModelShard(rank, 2, by_expert)
        model, _ = shard.read([mixtral / "model.safetensors"], AutoConfig.from_pretrained(mixtral), config)
        experts = [value for name, value in model.named_parameters() if ".experts." in name]
        num_read[rank] = sum(map(torch.Size.numel, shapes_read))
        assert num_read[rank] == sum(value.numel() for value in experts)
        shapes_read.clear()
    assert num_read[0] == num_read[1]


def test_what_is_stored_as_the_model_has_it_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays in the pages of the file, which the ranks of a machine share."""
    path, opened = checkpoints.write("llama", tmp_path), dict[str, Any]()
    by_name = sharded_loader.by_model_name

    def noting(views: Any, model: Any) -> dict[str, Any]:
        opened.update(by_name(views, model))
        return opened

    monkeypatch.setattr(sharded_loader, "by_model_name", noting)
    model = read_by_tensor([path / "model.safetensors"], AutoConfig.from_pretrained(path), EngineConfig(str(path)))
    for name, value in chain(model.named_parameters()):
        assert value.data_ptr() == opened[name][...].data_ptr(), name
