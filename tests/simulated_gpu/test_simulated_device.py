"""The fake does what a GPU does as far as tests rely on it: refuses mixed devices, and counts."""

from __future__ import annotations

import pytest
import torch

from tests.simulated_gpu.device import GPU, Counts, MixedDevices, NotRecordable, SimulatedGPU
from workers.step import Readback, upload


@pytest.fixture
def rows(gpu: SimulatedGPU) -> torch.Tensor:
    rows = upload([[1.0, 2.0], [3.0, 4.0]], GPU)
    gpu.counts = Counts()
    return rows


@pytest.mark.parametrize(
    "mixed",
    [
        lambda rows: rows + torch.ones(2),
        lambda rows: rows[torch.tensor([0])],
        lambda rows: torch.cat([rows, torch.ones(1, 2)]),
        lambda rows: rows.index_fill_(0, torch.tensor([0]), 0.0),
        lambda rows: torch.where(torch.tensor([True, False]), rows, rows),
        lambda rows: torch.matmul(torch.ones(2, 2), rows),
    ],
)
def test_tensors_of_two_devices_do_not_mix(rows: torch.Tensor, mixed: object) -> None:
    with pytest.raises(MixedDevices):
        mixed(rows)


def test_what_is_computed_is_right_and_stays_there(gpu: SimulatedGPU, rows: torch.Tensor) -> None:
    half = rows[1]
    half.mul_(torch.tensor(2.0))  # a single number of the host is passed to the kernel
    found = torch.nn.functional.linear(rows, rows) + torch.arange(2, device="cuda")
    assert (found.device, rows.device) == (GPU, GPU)
    assert gpu.counts.kernels == {"mul_": 1, "mm": 1, "arange": 1, "add": 1}
    assert not gpu.counts.waits
    assert found.tolist() == [[5.0, 23.0], [22.0, 101.0]]


@pytest.mark.parametrize(
    "reads",
    [
        lambda rows: rows.tolist(),
        lambda rows: rows[0, 0].item(),
        lambda rows: float(rows[0, 0]),
        lambda rows: bool(rows[0, 0] > 0),
        lambda rows: rows.cpu(),
        lambda rows: rows[rows > 1],
        lambda rows: rows.nonzero(),
        lambda rows: torch.equal(rows, rows),
        lambda rows: torch.zeros(2, 2).copy_(rows),
    ],
)
def test_what_reads_a_value_waits(gpu: SimulatedGPU, rows: torch.Tensor, reads: object) -> None:
    reads(rows)
    assert len(gpu.counts.waits) == 1


def test_a_readback_waits_once(gpu: SimulatedGPU, rows: torch.Tensor) -> None:
    readback = Readback()
    asked = readback.add(rows), readback.argmax(rows), readback.add(rows[0].long())
    readback.wait()
    assert [found() for found in asked] == [[[1.0, 2.0], [3.0, 4.0]], ([1, 1], [2.0, 4.0]), [1, 2]]
    assert len(gpu.counts.waits) == 1


def test_an_upload_waits_unless_it_is_from_pinned_memory(gpu: SimulatedGPU) -> None:
    gpu.counts = Counts()
    upload([1, 2], GPU)
    torch.zeros(2, device=GPU).copy_(torch.ones(2, pin_memory=True)[:2], non_blocking=True)
    assert (gpu.counts.uploads, gpu.counts.waits) == (2, [])
    torch.ones(2).to(GPU, non_blocking=True)
    torch.ones(2, pin_memory=True).to(GPU)
    assert (gpu.counts.uploads, len(gpu.counts.waits)) == (4, 2)


@pytest.mark.parametrize("work", [lambda rows: rows.sum().item(), lambda _: upload([1], GPU), lambda rows: rows.cpu()])
def test_nothing_is_recorded_that_waits_or_uploads(gpu: SimulatedGPU, rows: torch.Tensor, work: object) -> None:
    with pytest.raises(NotRecordable):
        gpu.record(lambda: work(rows))
    gpu.record(lambda: rows.mul_(2))()
    assert gpu.recorded.kernels == {"mul_": 1}
    assert rows.tolist() == [[4.0, 8.0], [12.0, 16.0]]


def test_outside_of_the_block_there_is_no_gpu(gpu: SimulatedGPU, rows: torch.Tensor) -> None:
    with torch.utils._python_dispatch._disable_current_modes(), pytest.raises(AssertionError, match="outside"):
        rows.add(1)
