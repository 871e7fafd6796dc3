"""Weights of a linear layer in the layout that `workers.native.machine` reads: panels of 32 outputs, input by input.

Knows numbers; must not know modules.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from workers.native import machine
from workers.native.pages import Pages
from workers.native.panels import GROUP
from workers.native.vectors import HAS_PAIRS, PANEL

Quantized: TypeAlias = Literal["int8", "int4"]
_LARGEST: Final = {"int8": 127, "int4": 7}


class Matrix:
    """A weight [out, in] and a bias. It takes no memory until `pack`."""

    def __init__(
        self, num_outputs: int, num_inputs: int, dtype: torch.dtype, quantized: Quantized | None = None
    ) -> None:
        """int4 needs a multiple of 32 inputs; others are kept as int8."""
        self.num_outputs, self.num_inputs = num_outputs, num_inputs
        self.num_panels = -(-num_outputs // PANEL)
        if quantized:
            self.kind = machine.INT4 if quantized == "int4" and num_inputs % GROUP == 0 else machine.INT8
        elif dtype == torch.bfloat16:
            self.kind = machine.PAIRS if HAS_PAIRS else machine.BFLOAT16
        else:
            self.kind = machine.FLOAT32
        self.padded_inputs = num_inputs + (num_inputs % 2 if self.kind == machine.PAIRS else 0)
        self._weight = self._scales = self._bias = torch.zeros(0)

    def pack(self, weight: Tensor, bias: Tensor | None, pages: Pages) -> None:
        """Lay out a weight [out, in] in memory of `pages`."""
        if bias is not None:
            self._bias = torch.zeros(self.num_panels * PANEL).index_copy_(0, torch.arange(len(bias)), bias.float())
        if self.kind in (machine.INT8, machine.INT4):
            self._pack_integers(_padded(weight.float(), self.num_panels * PANEL), pages)
            return
        rows = _padded(weight, self.num_panels * PANEL, self.padded_inputs)
        if self.kind == machine.PAIRS:
            by_panel = rows.view(self.num_panels, 2, PANEL // 2, -1, 2).permute(0, 3, 1, 2, 4)
        else:
            by_panel = rows.view(self.num_panels, PANEL, -1).transpose(1, 2)
        self._weight = pages.copy(by_panel)

    def _pack_integers(self, weight: Tensor, pages: Pages) -> None:
        """Round to integers: in int8 with a scale for each output, in int4 with one for each group of inputs."""
        is_int8 = self.kind == machine.INT8
        groups = weight.view(self.num_panels, PANEL, -1, self.num_inputs if is_int8 else GROUP)
        scales = (groups.abs().amax(-1) / _LARGEST["int8" if is_int8 else "int4"]).clamp(min=1e-12)
        numbers = (groups / scales[..., None]).round().to(torch.int8)  # [P, 32, groups, inputs]
        self._scales = scales.transpose(1, 2).contiguous()
        if is_int8:
            self._weight = pages.copy(numbers.view(self.num_panels, PANEL, -1).transpose(1, 2))
            return
        nibbles = (numbers.int() & 15).view(self.num_panels, PANEL, -1, 8)
        words = (nibbles << (4 * torch.arange(8, dtype=torch.int32))).sum(-1, dtype=torch.int64).to(torch.int32)
        self._weight = pages.copy(words.transpose(1, 2))  # [P, inputs / 8, 32]

    @property
    def code(self) -> list[int]:
        """Columns of a product's code: addresses and sizes."""
        of_panel = self._weight[0].numel() * self._weight.element_size()
        has_groups = self.kind == machine.INT4
        steps = {machine.PAIRS: self.padded_inputs // 2, machine.INT4: self.num_inputs // GROUP}
        return [
            self._weight.data_ptr(),
            self._scales.data_ptr() if len(self._scales) else 0,
            self._bias.data_ptr() if len(self._bias) else 0,
            self.num_inputs,
            self.num_panels,
            self.padded_inputs,
            steps.get(self.kind, self.num_inputs),
            of_panel,
            self._scales[0].numel() * 4 if has_groups else 0,
        ]


def _padded(weight: Tensor, num_outputs: int, num_inputs: int | None = None) -> Tensor:
    """The weight with zeros at its ends."""
    missing = (num_inputs or weight.shape[1]) - weight.shape[1], num_outputs - weight.shape[0]
    return torch.nn.functional.pad(weight, (0, missing[0], 0, missing[1])).contiguous() if any(missing) else weight
