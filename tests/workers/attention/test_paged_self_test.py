"""A kernel is used where it can be and does what gathering does; else the log says why KV is gathered."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.workers.attention.kernels import PlainKernel
from workers.attention import paged_self_test
from workers.attention.paged import LayerKind
from workers.attention.paged_self_test import difference, find_kernel
from workers.step.kv_cache import KVCache, LayerShape

CPU = torch.device("cpu")


def make_cache(shape: LayerShape, block_tokens: int = 16, dtype: torch.dtype = torch.bfloat16) -> KVCache:
    return KVCache([shape], 1, block_tokens, dtype, CPU)


def test_on_a_cpu_there_is_none_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert find_kernel(make_cache(LayerShape(2, 64, 64))) is None
    assert not caplog.records


def test_layers_without_attention_are_left_out() -> None:
    for shapes in ([LayerShape(), LayerShape(1, 8, 8)], [LayerShape()]):
        assert difference(KVCache(shapes, 1, 8, torch.float32, CPU), PlainKernel()) is None


class ForgetsTheNewestRow(PlainKernel):
    def _visible(self, reads, row, end, window):
        return super()._visible(reads, row, end, window)[:-1] or [0]


class IgnoresTrees(PlainKernel):
    def attend(self, query, keys, values, reads, kind):
        masks = torch.zeros_like(reads.masks)
        return super().attend(query, keys, values, replace(reads, masks=masks), kind)


class Ignores(PlainKernel):
    """Does not know a setting of layers."""

    def __init__(self, setting):
        self._setting = setting

    def attend(self, query, keys, values, reads, kind):
        known = LayerKind(kind.scale, kind.window, kind.softcap, kind.sinks)
        return super().attend(query, keys, values, reads, replace(known, **{self._setting: None}))


class LeavesRowsUnwritten(PlainKernel):
    def attend(self, *args):
        output = super().attend(*args)
        output[-1] = torch.nan
        return output


class StoresNothing(PlainKernel):
    def store(self, *args):
        pass


class Refuses(PlainKernel):
    def attend(self, *args):
        raise RuntimeError("ptxas fatal: sm_75 is not supported\nand more")


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (PlainKernel(), None),
        (ForgetsTheNewestRow(), "off by"),
        (IgnoresTrees(), "off by"),
        (StoresNothing(), "off by"),
        (Ignores("window"), "off by"),
        (Ignores("softcap"), "off by"),
        (Ignores("sinks"), "off by"),
        (LeavesRowsUnwritten(), "off by nan"),
        (Refuses(), "ptxas fatal: sm_75 is not supported"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_kernel_gets_wrong_is_noticed(kernel: Any, reason: str | None, dtype: torch.dtype) -> None:
    cache = make_cache(LayerShape(1, 8, 8), block_tokens=8, dtype=dtype)
    found = difference(cache, kernel)
    assert found is None if reason is None else reason in str(found)


def test_a_kernel_reads_values_that_are_the_beginnings_of_keys() -> None:
    shape = LayerShape(1, 24, 16, values_in_keys=True)
    assert difference(make_cache(shape, dtype=torch.float32), PlainKernel()) is None
    assert "off by" in str(difference(make_cache(shape, dtype=torch.float32), ForgetsTheNewestRow()))


@pytest.mark.parametrize("block_tokens", [1, 2, 4, 16, 256])
def test_blocks_of_any_size_have_room_for_the_test(block_tokens: int) -> None:
    assert difference(make_cache(LayerShape(1, 8, 8), block_tokens, torch.float32), PlainKernel()) is None


def test_a_gpu_that_gathers_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cache = make_cache(LayerShape(2, 64, 64))
    cache.device = torch.device("cuda")
    monkeypatch.setattr(paged_self_test, "difference", lambda *_: "the kernel is off by 0.3 of a row's norm")
    monkeypatch.setitem(
        sys.modules, "workers.attention.triton_attention", SimpleNamespace(TritonKernel=lambda **_: None)
    )
    with caplog.at_level(logging.WARNING, logger=paged_self_test.__name__):
        assert find_kernel(cache) is None
    monkeypatch.setitem(sys.modules, "workers.attention.triton_attention", None)
    with caplog.at_level(logging.WARNING, logger=paged_self_test.__name__):
        assert find_kernel(cache) is None
    wrong, missing = (record.getMessage() for record in caplog.records)
    said = "attention gathers KV, so that every step takes longer: "
    assert wrong == f"{said}the kernel is off by 0.3 of a row's norm"
    assert missing.startswith(said)
    assert missing.endswith("; pip install triton")
