"""Weights reach a GPU through pinned buffers, without a wait of the host, and with the bits that a CPU has."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch

from core.config import EngineConfig
from tests import checkpoints
from tests.simulated_gpu.device import SimulatedGPU
from workers.model.checked import check
from workers.model.shards import reading
from workers.model.shards.sharded_loader import read_by_tensor

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
def test_weights_are_copied_from_pinned_buffers(
    family: str, gpu: SimulatedGPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.write(family, tmp_path)
    monkeypatch.setattr(reading, "BUFFER_BYTES", 1000)  # no multiple of a row, of which some are longer

    def read(device: str) -> dict[str, torch.Tensor]:
        config = EngineConfig(str(path), dtype="bfloat16", device=device)
        checkpoint = check(config)
        model = read_by_tensor(checkpoint.files, checkpoint.model_config, config)
        num_buffers.append(len(list(model.buffers())))
        return dict(chain(model.named_parameters(), model.named_buffers()))

    num_buffers: list[int] = []
    num_waits, num_uploads = len(gpu.counts.waits), gpu.counts.uploads  # other tests have used the device before
    there, here = read("cuda"), read("cpu")
    assert there.keys() == here.keys()
    assert all(value.device.type == "cuda" for value in there.values())
    assert len(gpu.counts.waits) - num_waits == num_buffers[0], "what is computed on the host is small"
    num_bytes = sum(value.nbytes for value in there.values())
    assert gpu.counts.uploads - num_uploads > num_bytes / 1000
    assert all(torch.equal(there[name].cpu(), value) for name, value in here.items())
