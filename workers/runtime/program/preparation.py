"""Prepares a model for native code: its operations become a program, and its linear layers native products.

The first import on a machine compiles for some ten seconds. Knows modules; must not know steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from core.config import EngineConfig
from core.errors import first_line
from workers.model import ModelShard
from workers.native.matrix import Matrix
from workers.native.pages import Pages
from workers.native.product import NativeProduct
from workers.native.ranks.shared import ALONE, Exchange
from workers.native.team import Team
from workers.runtime.backend import BackendUnavailable
from workers.runtime.program import recorder
from workers.runtime.program.assembly import Assembler
from workers.runtime.program.program import Program

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NativeCode:
    """Native code of a model."""

    program: Program | None
    """None if only its products are native code."""
    team: Team
    exchange: Exchange = ALONE
    """Memory that this rank shares with the model's other ranks."""


@torch.no_grad()
def prepare(
    model: nn.Module,
    run: Callable[[recorder.Recording], recorder.Outputs],
    output: nn.Module | None,
    config: EngineConfig,
    given_width: int = 0,
    shard: ModelShard | None = None,
) -> NativeCode:
    """Record `run`, then pack the model's weights; changes nothing if that fails, unless weights are quantized."""
    exchange = ALONE if shard is None else shard.collectives.exchange
    if exchange is None:
        raise BackendUnavailable("its ranks share no memory")
    matrices: dict[Any, Matrix] = {}

    def matrix_of(layer: Any) -> Matrix:
        if (native := _native(layer)) is not None:
            return native.matrix
        if layer not in matrices:
            quantized = None if layer is output else config.quantize
            num_outputs, num_inputs = _weight(layer).shape
            matrices[layer] = Matrix(num_outputs, num_inputs, layer.weight.dtype, quantized)
        return matrices[layer]

    try:
        program: Program | None = Assembler(recorder.record(model, run, given_width, shard), matrix_of).program()
    except Exception as error:
        if config.quantize is None:
            raise
        logger.info("%s is run by its own code, with quantized products: %s", type(model).__name__, first_line(error))
        program = None
    team, pages = Team(config.num_threads), Pages()
    layers: list[Any] = [module for module in model.modules() if type(module) in (nn.Linear, Conv1D)]
    for layer in [layer for layer in layers if _native(layer) is None]:
        matrix = matrix_of(layer)
        matrix.pack(_weight(layer), layer.bias, pages)
        layer.forward = NativeProduct(matrix, team)
        placeholder = layer.weight.new_full((1, 1), torch.nan).expand_as(layer.weight)
        layer.weight = nn.Parameter(placeholder, requires_grad=False)
    return NativeCode(program, team, exchange)


def _native(layer: Any) -> NativeProduct | None:
    """The layer's native product, if another model that has this layer was prepared before.

    Raises: BackendUnavailable.
    """
    own = vars(layer).get("forward")
    if own is not None and not isinstance(own, NativeProduct):
        raise BackendUnavailable("it has a layer whose weight is packed for other operators")
    return own


def _weight(layer: Any) -> Tensor:
    """# [out, in]"""
    weight: Tensor = layer.weight.detach()
    return weight.t() if isinstance(layer, Conv1D) else weight
