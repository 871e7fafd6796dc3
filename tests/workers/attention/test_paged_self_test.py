"""A kernel is used where it can be and does what gathering does; else the log says why KV is gathered."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.workers.attention.kernels import PlainKernel
from workers.attention import paged_self_test
from workers.attention.paged_self_test import difference, find_kernel, obstacle
from workers.step.kv_cache import KVCache, LayerShape

AMPERE = (8, 0)
CPU = torch.device("cpu")


def make_cache(shape: LayerShape, block_tokens: int = 256, dtype: torch.dtype = torch.bfloat16) -> KVCache:
    return KVCache([shape], 1, block_tokens, dtype, CPU)


def test_on_a_cpu_there_is_none_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert find_kernel(make_cache(LayerShape(2, 64, 64))) is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (make_cache(LayerShape(2, 64, 64)), None),
        (make_cache(LayerShape(2, 64, 64), dtype=torch.float32), "dtype is torch.float32"),
        (
            make_cache(LayerShape(2, 64, 64), block_tokens=16),
            "block_tokens is 16, and the kernel takes multiples of 256",
        ),
        (make_cache(LayerShape(2, 192, 128)), "keys have 192 dimensions and values 128"),
        (make_cache(LayerShape(2, 20, 20)), "keys have 20"),
        (make_cache(LayerShape(2, 264, 264)), "keys have 264"),
    ],
)
def test_what_torchs_kernel_does_not_take_is_known_before(cache: KVCache, reason: str | None) -> None:
    found = obstacle(cache, AMPERE)
    assert found is None if reason is None else reason in str(found)


def test_older_gpus_have_none() -> None:
    assert "(7, 5)" in str(obstacle(make_cache(LayerShape(2, 64, 64)), (7, 5)))


class ForgetsTheNewestRow(PlainKernel):
    def causal(self, query, keys, values, reads, scale, window):
        return self._run(query, keys, values, reads, scale, lambda length, left: (max(1, length - left - 1), window))[0]


class MixesUpLogarithms(PlainKernel):
    def unmasked(self, *args):
        output, logarithms = super().unmasked(*args)
        return output, logarithms.T.reshape(logarithms.shape)


class LeavesRowsUnwritten(PlainKernel):
    def causal(self, *args):
        output = super().causal(*args)
        output[-1] = torch.nan
        return output


class Refuses(PlainKernel):
    def causal(self, *args):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nand more")


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (PlainKernel(), None),
        (ForgetsTheNewestRow(), "off by"),
        (MixesUpLogarithms(), "off by"),
        (LeavesRowsUnwritten(), "off by nan"),
        (Refuses(), "FlashAttention only supports Ampere GPUs or newer."),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_kernel_gets_wrong_is_noticed(kernel: Any, reason: str | None, dtype: torch.dtype) -> None:
    cache = make_cache(LayerShape(1, 8, 8), block_tokens=8, dtype=dtype)
    found = difference(cache, kernel)
    assert found is None if reason is None else reason in str(found)


def test_a_gpu_that_gathers_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cache = make_cache(LayerShape(2, 64, 64), block_tokens=16)
    cache.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: AMPERE)
    with caplog.at_level(logging.WARNING, logger=paged_self_test.__name__):
        assert find_kernel(cache) is None
    assert [record.getMessage() for record in caplog.records] == [
        "attention gathers KV, so that every step takes longer: "
        "block_tokens is 16, and the kernel takes multiples of 256"
    ]
