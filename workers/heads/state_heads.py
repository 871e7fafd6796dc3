"""Heads that read one hidden state of the target: Medusa's, and those of Blockwise Parallel Decoding.

Head number i guesses the token that follows the next one by i: the output layer gives the next token, head 0 the one
after it. A head is a few residual layers, then an output layer of its own (Medusa) or the target's (Blockwise). No head
sees what another one guesses.

Sources: Stern et al. 2018 (arXiv 1811.03115), section 4, here without a hidden layer; Cai et al. 2024 (arXiv
2401.10774), section 2.1, and its code (`ResBlock`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.heads.eagle_settings import LAST_STATE
from workers.heads.tensors import check_of_target


@dataclass(frozen=True, slots=True)
class LastStateConfig:
    """A head that reads the target's last hidden state."""

    name: str
    """Name of the directory."""
    hidden_size: int
    """Hidden size of the target."""
    vocab_size: int
    """Rows of the target's output layer."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return LAST_STATE

    @property
    def feature_width(self) -> int:
        return self.hidden_size

    def check_target(self, hidden_size: int, vocab_size: int) -> None:
        """Raises: CheckpointError for a target that this head was not trained for."""
        own = {"hidden_size": self.hidden_size, "vocab_size": self.vocab_size}
        check_of_target(self.name, own, (hidden_size, vocab_size))


class Residual(nn.Module):
    """x + activation(W x + b); without an activation for Blockwise heads."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: nn.Module) -> None:
        """`weight` [hidden, hidden], `bias` [hidden]."""
        super().__init__()
        size = len(weight)
        self.linear = nn.Linear(size, size, bias=bias is not None, device="meta")
        self.linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.linear.bias = nn.Parameter(bias, requires_grad=False)
        self.activation = activation

    def forward(self, states: Tensor) -> Tensor:
        change: Tensor = self.activation(self.linear(states))
        return states + change


class StateHeads(nn.Module):
    """The heads of one target, by depth: those of depth 0 guess below the text's last token."""

    def __init__(self, heads: Sequence[nn.Module], dtype: torch.dtype) -> None:
        super().__init__()
        self._heads = nn.ModuleList(heads)
        self._dtype = dtype

    @property
    def max_depth(self) -> int:
        """Depth of the deepest guess below the text's last token."""
        return len(self._heads)

    @torch.inference_mode()
    def forward(self, states: Tensor, depth: int) -> Tensor:
        """Logits of the token below a node of this depth, from the state before the text's last token.

        # [rows, hidden] -> float32 [rows, vocab or more]
        """
        logits: Tensor = self._heads[depth](states.to(self._dtype))
        return logits.float()
