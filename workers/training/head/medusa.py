"""Medusa-1's heads with gradients.

Head i guesses the token at p + 2 + i from the target's last state of position p alone, by one residual layer,
x + SiLU(W x + b), and an output layer of its own. W and b begin as 0, the output layers as the target's. Weights have
the names of the published format (docs/howto/draft-with-a-head.md). Source: Cai et al. 2024 (arXiv 2401.10774), 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.functional import silu

from workers.training.packing import PackedTexts


class MedusaHead(nn.Module):
    """The trained tensors of one head."""

    def __init__(self, output: Tensor) -> None:
        """`output`: the target's output layer [V, hidden]."""
        super().__init__()
        self.linear = nn.Linear(output.shape[1], output.shape[1])
        for parameter in self.linear.parameters():
            nn.init.zeros_(parameter)
        # An embedding, for its rows are tokens', and the optimizer treats it so.
        self.output = nn.Embedding(*output.shape)
        self.output.weight.data = output.detach().float().clone()


class MedusaHeads(nn.Module):
    """The heads of one target."""

    def __init__(self, output: Tensor, num_heads: int) -> None:
        super().__init__()
        self._heads = [MedusaHead(output) for _ in range(num_heads)]
        self._registered = nn.ModuleList(self._heads)

    def tensors(self) -> dict[str, Tensor]:
        """Published names."""
        named: dict[str, Tensor] = {}
        for number, head in enumerate(self._heads):
            named |= {f"{number}.0.linear.{name}": each for name, each in head.linear.named_parameters()}
            named[f"{number}.1.weight"] = head.output.weight
        return named

    def steps(self, one: PackedTexts, num_steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """`Steps` of these heads."""
        for head in self._heads[:num_steps]:
            weight = head.output.weight
            last = one.states[:, -weight.shape[1] :].to(weight.device, weight.dtype)
            yield last + silu(head.linear(last)), weight
