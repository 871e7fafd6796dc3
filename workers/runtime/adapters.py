"""LoRA adapters of a model, and passes in which some rows are computed with one.

The rows of each adapter are gathered, multiplied by its two narrow matrices, and added to the outputs of the linear
layers that it adapts (idea: Punica, Chen et al. 2023, arXiv 2310.18547, section 4). A pass without adapters runs the
model as if there were none. Knows modules and rows. Must not know files, sessions or names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from core.config import EngineConfig
from workers.model import LoraPair, LoraWeights
from workers.products import product
from workers.step import Step, upload

TILE_ROWS: Final = 8
"""Rows of one product in deterministic mode on a CPU, where a row's bits depend on the shape that it is computed in."""

Rows: TypeAlias = slice | Tensor
"""Rows of a module's input: a slice if they are contiguous, else their indices."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One adapter's rows in a pass, and its matrices for one module."""

    rows: Rows
    pair: LoraPair


class Adapters:
    """The adapters that a model has, by number."""

    def __init__(self, model: Any, config: EngineConfig) -> None:
        self._model = model
        self._is_deterministic = config.deterministic
        self._weights: dict[int, LoraWeights] = {}
        self._called: set[str] = set()
        """Modules that the last pass with adapters has called."""

    def add(self, number: int, weights: LoraWeights) -> None:
        self._weights[number] = weights

    def drop(self, number: int) -> None:
        self._weights.pop(number, None)

    def uncalled(self, number: int) -> list[str]:
        """Modules of an adapter that the last pass has not called: its code uses their weights in another way."""
        return [name for name in self._weights[number].pairs if name not in self._called]

    @contextmanager
    def applied(self, step: Step) -> Iterator[None]:
        """Meanwhile the model computes the rows of this step with their adapters.

        Hooks are attached for the one pass, because code that was compiled or recorded earlier ignores them, and a pass
        without adapters should not call them.
        """
        self._called.clear()
        with ExitStack() as hooks:
            for name, module, parts in self._parts(step):
                # Ahead of a rank's collectives, which then add up and gather the adapted outputs.
                handle = module.register_forward_hook(partial(self._add_to_output, name, parts), prepend=True)
                hooks.callback(handle.remove)
            yield

    def _parts(self, step: Step) -> Iterator[tuple[str, nn.Module, Sequence[_Part]]]:
        device, head = self._model.device, self._model.get_output_embeddings()
        by_row = [0] * len(step.ids)
        for span in step.spans:
            by_row[span.first_row : span.first_row + span.num_rows] = [span.adapter] * span.num_rows
        of_rows = _rows_by_adapter(by_row, device)
        of_wanted = _rows_by_adapter([by_row[row] for row in step.wanted], device)
        names = dict.fromkeys(name for number in of_rows for name in self._weights[number].pairs)
        for name in names:
            module = self._model.get_submodule(name)
            found = of_wanted if module is head else of_rows  # the output layer gets the wanted rows alone
            pairs = {number: self._weights[number].pairs.get(name) for number in found}
            yield name, module, [_Part(found[number], pair) for number, pair in pairs.items() if pair is not None]

    def _add_to_output(
        self, name: str, parts: Sequence[_Part], _module: nn.Module, args: tuple[Tensor], output: Tensor
    ) -> None:
        """Add each part's product to its rows of a linear layer's output, in place."""
        self._called.add(name)
        inputs, outputs = args[0].flatten(0, -2), output.view(-1, output.shape[-1])
        for part in parts:
            outputs[part.rows] += self._product(inputs[part.rows], part.pair)

    def _product(self, rows: Tensor, pair: LoraPair) -> Tensor:
        if not self._is_deterministic:
            return _multiply(rows, pair)
        if rows.device.type != "cpu":
            return product(product(rows, pair.down, None, is_tiled=True), pair.up, None, is_tiled=True)
        padded = F.pad(rows, (0, 0, 0, -len(rows) % TILE_ROWS))
        return torch.cat([_multiply(tile, pair) for tile in torch.split(padded, TILE_ROWS)])[: len(rows)]


def _multiply(rows: Tensor, pair: LoraPair) -> Tensor:
    return F.linear(F.linear(rows, pair.down), pair.up)


def _rows_by_adapter(by_row: Sequence[int], device: torch.device) -> dict[int, Rows]:
    """The rows of each adapter but 0, which stands for none."""
    found: dict[int, list[int]] = {}
    for row, number in enumerate(by_row):
        if number:
            found.setdefault(number, []).append(row)
    return {number: _as_slice(rows) or upload(rows, device, torch.int64) for number, rows in found.items()}


def _as_slice(rows: Sequence[int]) -> slice | None:
    return slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else None
