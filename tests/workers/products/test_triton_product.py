"""The Triton product against torch's: compiled on a GPU, elsewhere in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
import torch

from tests.workers.triton_process import run

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
INTERPRETED = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


SIZES = {f"{rows}-{inputs}-{outputs}": (rows, inputs, outputs) for rows, inputs, outputs in (
    (1, 128, 64), (17, 200, 70), (130, 30, 5)
)}  # fmt: skip
"""Numbers of rows, inputs and outputs."""


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    """Results of one process, for all tests: starting one takes longer than its work."""
    return json.loads(run(__name__, "t.write_found()", **INTERPRETED))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_it_gives_what_torch_gives(sizes: str, found: dict[str, float], *, has_bias: bool) -> None:
    assert found[f"{sizes}-{has_bias}"] < 1e-5


def test_rows_and_weights_may_be_transposed_views(found: dict[str, float]) -> None:
    assert found["views"] < 1e-5


def test_bits_do_not_depend_on_the_number_of_rows(found: dict[str, float]) -> None:
    """Each size of a tile, and several tiles."""
    assert found["equal bits"] is True


def write_found() -> None:
    errors = {
        f"{name}-{has_bias}": largest_error(*sizes, has_bias=has_bias)
        for name, sizes in SIZES.items()
        for has_bias in (False, True)
    }
    json.dump(errors | {"views": error_of_views(), "equal bits": have_equal_bits()}, sys.stdout)


def largest_error(num_rows: int, num_inputs: int, num_outputs: int, *, has_bias: bool) -> float:
    rows, weight = torch.randn(num_rows, num_inputs), torch.randn(num_outputs, num_inputs)
    return _error(rows, weight, torch.randn(num_outputs) if has_bias else None)


def error_of_views() -> float:
    return max(
        _error(torch.randn(40, 3).t(), torch.randn(70, 40), None),
        _error(torch.randn(3, 40), torch.randn(40, 70).t(), None),
        _error(torch.randn(3, 90)[:, 20:60], torch.randn(70, 40), None),
    )


def have_equal_bits() -> bool:
    """Sums of integers within 128 inputs are exact, whatever library the interpreter calls; sums of those are not."""
    scales = 2.0 ** (torch.arange(8) * 5 % 23).repeat_interleave(128)
    rows = torch.randint(-8, 8, (150, 1000)) * scales[:1000]
    weight = torch.randint(-8, 8, (64, 1000)).float()
    whole = _product(rows, weight, None)
    return all(
        torch.equal(_product(rows[:count], weight, None), whole[:count]) for count in (1, 2, 16, 17, 33, 65, 128)
    )


def _error(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> float:
    want = torch.nn.functional.linear(rows.double(), weight.double(), None if bias is None else bias.double())
    return float((_product(rows, weight, bias) - want).abs().max() / want.abs().max())


def _product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    from workers.products.triton_product import product

    return product(rows.to(DEVICE), weight.to(DEVICE), None if bias is None else bias.to(DEVICE)).cpu()
