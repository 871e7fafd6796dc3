"""Stands in for transformers' cache in a mixer's call: holds the states of one call, one for each row of its batch."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

StateName: TypeAlias = tuple[str, int]
"""Kind of the state, and its number in the layer."""
CONV, RECURRENT = "conv", "recurrent"


class CallStates:
    """States by name, in the layout of `transformers.cache_utils.LinearAttentionLayer`. A call changes them."""

    def __init__(self, values: dict[StateName, Tensor]) -> None:
        """Without values it stands for sequences that have no rows yet."""
        self.values = values

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:  # noqa: ARG002
        return self.values.get((CONV, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:  # noqa: ARG002
        return self.values.get((RECURRENT, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,  # noqa: ARG002
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Append new columns [B, D, T]. Returns them with the earlier ones that the convolution reads."""
        before = self.values.get((CONV, state_idx))
        size = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        columns = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        columns = functional.pad(columns, (max(0, size - columns.shape[-1]), 0))
        self.values[CONV, state_idx] = columns[..., -size:]
        return columns

    def update_recurrent_state(
        self,
        recurrent_states: Tensor,
        layer_idx: int,  # noqa: ARG002
        state_idx: int = 0,
        **_: Any,
    ) -> Tensor:
        self.values[RECURRENT, state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002
        return False

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return bool(self.values)
