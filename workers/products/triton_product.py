"""Product of few rows with a matrix of weights, as one Triton kernel.

A program computes 64 outputs of a tile of rows. Weights are the first operand of the tensor cores and fill its 64 rows.
The sum over the inputs runs in one fixed order, so an element's bits do not depend on the number of rows. Import it
only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.shared_memory import num_stages

OUTPUTS, INPUTS = 64, 128
"""Sizes of a program's tile."""
ROWS = (16, 32, 64, 128)
"""Choices for the rows of a tile: the smallest with room, else the largest. All give the same bits (`bench gpu`)."""
FEW_PROGRAMS = 264
"""With fewer programs, each keeps more loads in flight. Chosen on an H200 (docs/adr/gpu-runtime)."""


def product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rows [R, K] times weight [N, K], transposed, plus bias [N]; in the dtype of `rows`.  # [R, N]"""
    num_rows, num_inputs = rows.shape
    num_outputs = len(weight)
    rows, weight = (each if each.stride(1) == 1 else each.contiguous() for each in (rows, weight))  # for the kernel
    outputs = torch.empty(num_rows, num_outputs, dtype=rows.dtype, device=rows.device)
    num_programs = triton.cdiv(num_outputs, OUTPUTS)
    tile_rows = next((size for size in ROWS if size >= num_rows), ROWS[-1])
    wanted = 3 if tile_rows > ROWS[0] else 6 if num_programs < FEW_PROGRAMS else 4
    stages = num_stages(rows.device, (OUTPUTS + tile_rows) * INPUTS * rows.itemsize, wanted)
    _multiply[(num_programs, triton.cdiv(num_rows, tile_rows))](
        rows, weight, bias, outputs, num_rows, num_outputs, num_inputs, rows.stride(0), weight.stride(0),
        OUTPUTS=OUTPUTS, INPUTS=INPUTS, ROWS=tile_rows, IS_EVEN=num_inputs % INPUTS == 0, HAS_BIAS=bias is not None,
        PRECISION="ieee" if rows.dtype == torch.float32 else "tf32",
        num_stages=stages, num_warps=4,
    )  # fmt: skip
    return outputs


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _multiply(
    rows: tl.tensor, weight: tl.tensor, bias: tl.tensor, outputs: tl.tensor,
    num_rows: tl.tensor, num_outputs: tl.tensor, num_inputs: tl.tensor, row_stride: tl.tensor, weight_stride: tl.tensor,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, IS_EVEN: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    number, row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_output, is_row, of_tile = number < num_outputs, row < num_rows, tl.arange(0, INPUTS)
    weight += number.to(tl.int64)[:, None] * weight_stride
    rows += row.to(tl.int64)[None, :] * row_stride
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(0, num_inputs, INPUTS):
        place = start + of_tile
        if IS_EVEN:
            of_weight = tl.load(weight + place[None, :], mask=is_output[:, None], other=0.0)
            of_rows = tl.load(rows + place[:, None], mask=is_row[None, :], other=0.0)
        else:
            is_input = place < num_inputs
            of_weight = tl.load(weight + place[None, :], mask=is_output[:, None] & is_input[None, :], other=0.0)
            of_rows = tl.load(rows + place[:, None], mask=is_row[None, :] & is_input[:, None], other=0.0)
        total = tl.dot(of_weight, of_rows, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + number, mask=is_output, other=0.0).to(tl.float32)[:, None]
    place = row.to(tl.int64)[None, :] * num_outputs + number[:, None]
    tl.store(outputs + place, total.to(outputs.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])
