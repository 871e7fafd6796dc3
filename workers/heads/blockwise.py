"""The first head of Blockwise Parallel Decoding: one linear layer that guesses the token after the next one.

Source: Stern et al. 2018 (arXiv 1811.03115), section 4. The paper's heads are feed-forward networks with a residual
connection, and share the target's output layer; this one has no hidden layer.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

WEIGHT: Final = "heads.0.weight"
"""Name of the head's tensor in its file.  # [hidden, hidden]"""


class BlockwiseHead(nn.Module):
    """Logits of the token two positions after a token, from that token's last hidden state h: output(h + W h)."""

    max_depth = 1
    """Depth of the deepest guess below the last token of the text."""

    def __init__(self, weight: Tensor, output: nn.Module) -> None:
        """`weight` [hidden, hidden]; `output` is the target's output layer."""
        super().__init__()
        self._weight = nn.Parameter(weight, requires_grad=False)
        self._output = output

    @torch.inference_mode()
    def forward(self, features: Tensor) -> Tensor:
        """# [rows, hidden] -> float32 logits [rows, vocab or more]"""
        states = features.to(self._weight.dtype)
        logits: Tensor = self._output(states + states @ self._weight.T)
        return logits.float()
