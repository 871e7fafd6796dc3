"""A kernel of noise is used only if its bits were right: with fakes for kernels, on a CPU."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from core import noise
from core.noise import Purpose
from workers.noise import gumbel, noise_self_test
from workers.noise.noise_self_test import checked, difference, find_noise_kernel

CPU = torch.device("cpu")
WRONG = "the kernel has other bits than core.noise"


class RightFake:
    """The operators, which stand for a kernel that is right."""

    def __call__(self, keys, vocab_size):
        return gumbel._gumbel_on_device(keys, vocab_size)


class OneBitFake(RightFake):
    """Wrong in the last bit of the last number."""

    def __call__(self, keys, vocab_size):
        numbers = super().__call__(keys, vocab_size).contiguous()
        numbers.view(torch.int32)[-1, -1] ^= 1
        return numbers


class OtherRowFake(RightFake):
    """Has the noise of the row below."""

    def __call__(self, keys, vocab_size):
        return super().__call__(keys.roll(1, 0), vocab_size)


class ShortFake(RightFake):
    def __call__(self, keys, vocab_size):
        return super().__call__(keys, vocab_size - 1)


class DoubleFake(RightFake):
    def __call__(self, keys, vocab_size):
        return super().__call__(keys, vocab_size).double()


class RaisingFake:
    def __init__(self, error):
        self.error = error

    def __call__(self, keys, vocab_size):
        raise self.error


class CompilerError(Exception):
    """An error like Triton's, which is no RuntimeError."""


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (RightFake(), None),
        (OneBitFake(), WRONG),
        (OtherRowFake(), WRONG),
        (ShortFake(), WRONG),
        (DoubleFake(), WRONG),
        (RaisingFake(ModuleNotFoundError("No module named 'triton'")), "ModuleNotFoundError: No module named 'triton'"),
        (RaisingFake(RuntimeError("Failed to find C compiler.\nmore")), "RuntimeError: Failed to find C compiler."),
        (RaisingFake(CompilerError("at 1:16:\ndef _fill")), "CompilerError: at 1:16:"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_kernel_that_is_wrong_or_fails_is_left_with_one_warning(kernel, reason, caplog):
    with caplog.at_level(logging.INFO, logger=noise_self_test.__name__):
        assert difference(kernel, CPU) == reason
        assert not caplog.records
        assert checked(kernel, CPU) is (kernel if reason is None else None)
    said = f"noise is computed by single operators, so that sampling on cpu takes longer: {reason}"
    assert [record.getMessage() for record in caplog.records] == ([] if reason is None else [said])


def test_on_a_cpu_no_kernel_is_looked_for(monkeypatch, caplog):
    monkeypatch.setattr(noise_self_test, "checked", RaisingFake(AssertionError("looked for one")))
    assert find_noise_kernel(CPU) is None
    assert not caplog.records


def test_a_gpu_s_kernel_is_looked_for_once(monkeypatch):
    asked, card = [], torch.device("cuda", 63)
    monkeypatch.setattr(noise_self_test, "checked", lambda kernel, device: asked.append(device) or kernel)
    find_noise_kernel.cache_clear()
    try:
        assert find_noise_kernel(card) is find_noise_kernel(card) is noise_self_test._by_triton
    finally:
        find_noise_kernel.cache_clear()
    assert asked == [card]


@pytest.mark.parametrize("kernel", [None, RightFake()], ids=["operators", "kernel"])
def test_rows_come_from_the_kernel_that_was_found_or_from_operators(kernel, monkeypatch):
    keys, calls = [noise.key(2**63 + seed, seed, 1, Purpose.DRAFT) for seed in range(5)], []

    def counted(*given):
        calls.append(given)
        return kernel(*given)

    monkeypatch.setattr(gumbel, "find_noise_kernel", lambda device: counted if kernel else None)
    found = gumbel._gumbel_on_gpu(torch.tensor(keys), 103)
    assert np.array_equal(found.numpy(), noise.gumbel_rows(keys, 103))
    assert len(calls) == (1 if kernel else 0)
