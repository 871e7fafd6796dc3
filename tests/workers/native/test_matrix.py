"""Products of native code are those of torch, and a row's bits do not depend on the other rows or on threads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from workers.native import arithmetic, intrinsics, machine, panels, registers, vectors
from workers.native.attention import reads, rows, tiles
from workers.native.matrix import Matrix, Quantized
from workers.native.pages import Pages
from workers.native.product import NativeProduct
from workers.native.ranks import exchange, shared
from workers.native.team import Team

SIZES = [(70, 48), (33, 96), (5, 7)]


def product_of(
    size: tuple[int, int], dtype: torch.dtype, quantized: Quantized | None = None, num_threads: int = 1
) -> tuple[NativeProduct, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    weight, bias = torch.randn(size).to(dtype), torch.randn(size[0]).to(dtype)
    matrix = Matrix(*size, dtype, quantized)
    matrix.pack(weight, bias, Pages())
    return NativeProduct(matrix, Team(num_threads)), weight, bias


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_products_are_those_of_torch(size: tuple[int, int], dtype: torch.dtype, allowed: float) -> None:
    product, weight, bias = product_of(size, dtype)
    rows = torch.randn(2, 11, size[1]).to(dtype)
    want = torch.nn.functional.linear(rows.float(), weight.float(), bias.float())
    got = product(rows)
    assert (got.dtype, got.shape) == (dtype, want.shape)
    torch.testing.assert_close(got.float(), want, rtol=allowed, atol=allowed)


@pytest.mark.parametrize(("quantized", "allowed"), [("int8", 0.02), ("int4", 0.2)])
@pytest.mark.parametrize("size", SIZES)
def test_integers_are_near_the_weights_that_they_stand_for(
    quantized: Quantized, allowed: float, size: tuple[int, int]
) -> None:
    product, weight, bias = product_of(size, torch.float32, quantized)
    has_groups = quantized == "int4" and size[1] % panels.GROUP == 0
    assert product.matrix.kind == (machine.INT4 if has_groups else machine.INT8)
    rows = torch.randn(9, size[1])
    want = torch.nn.functional.linear(rows, weight, bias)
    assert (product(rows) - want).norm() <= allowed * want.norm()
    eye = product(torch.eye(size[1])) - bias  # the weights that it computes with
    exact = torch.nn.functional.linear(rows, eye.t(), bias)
    torch.testing.assert_close(product(rows), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantized", [None, "int8", "int4"])
def test_bits_of_a_row_are_its_own(dtype: torch.dtype, quantized: Quantized | None) -> None:
    product, _, _ = product_of((70, 96), dtype, quantized)
    by_three, _, _ = product_of((70, 96), dtype, quantized, num_threads=3)
    rows = torch.randn(30, 96).to(dtype)
    together = product(rows)
    for count in range(1, 30):  # tiles of each size, after none, one and two of eight
        assert torch.equal(product(rows[:count]), together[:count]), count
    assert torch.equal(by_three(rows), together)


def test_no_rows_are_no_outputs() -> None:
    product, _, _ = product_of((5, 7), torch.float32)
    assert product(torch.zeros(1, 0, 7)).shape == (1, 0, 5)


@pytest.mark.parametrize(
    ("compiled", "parts"),
    [
        (tiles, (reads, vectors)),
        (rows, (arithmetic, intrinsics, reads, registers, tiles, vectors)),
        (exchange, (arithmetic, intrinsics, registers, shared, vectors)),
        (machine, (arithmetic, rows, exchange, intrinsics, panels, reads, registers, shared, tiles, vectors)),
    ],
    ids=["tiles", "attention", "exchange", "machine"],
)
def test_compiled_code_names_what_it_was_made_of(compiled: Any, parts: Sequence[Any]) -> None:
    """Numba compiles a file again when its text changes, and does not look at what it imports."""
    texts = b"".join(Path(str(each.__file__)).read_bytes() for each in parts)
    digest = hashlib.sha256(texts).hexdigest()[:16]
    assert digest == compiled.MADE_OF, f"write this digest into {compiled.__file__}"
