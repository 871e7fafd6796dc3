"""Random checkpoints with an MTP layer under its published names, and its formulas in plain torch, to compare with.

The decoder layer of the reference is transformers' own with eager attention, computed anew over all rows for each of
them; nothing of `workers` is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import checkpoints

QWEN = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
NUM_LAYERS = {"deepseek_v3": 2, "glm4_moe": 2, "glm4_moe_lite": 2, "qwen3_next": 3, "qwen3_5_text": 3}
"""Families, and the number of layers of their targets."""
_KINDS = ["linear_attention", "full_attention", "linear_attention"]


@dataclass
class Reference:
    """The layer of a checkpoint: its decoder layer reads eh_proj(cat(enorm(embedding), hnorm(feature)))."""

    family: str
    whole: Any
    """A model whose last layer is the MTP layer."""
    joining: dict[str, Tensor]

    def norm(self, states: Tensor, weight: Tensor) -> Tensor:
        scale = 1 + weight if self.family.startswith("qwen") else weight
        return scale * (states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.whole.config.rms_norm_eps))

    @torch.inference_mode()
    def outputs(self, tokens: list[int], features: Tensor, first: int = 1) -> Tensor:
        """Outputs of the rows of tokens from `first` on; the row of token i reads features[i - 1].  # [rows, hidden]"""
        positions = torch.arange(first - 1, len(tokens) - 1)
        embedded = self.whole.get_input_embeddings().weight[torch.tensor(tokens[first:])]
        if not self.family.startswith("qwen"):
            embedded = torch.where((positions == 0)[:, None], 0.0, embedded)
        read = [self.norm(embedded, self.joining["enorm"]), self.norm(features[first - 1 :], self.joining["hnorm"])]
        hidden = (torch.cat(read, -1) @ self.joining["eh_proj"].T)[None]
        future = torch.full((len(positions), len(positions)), -torch.inf).triu(1)
        base, layer = self.whole.model, self.whole.model.layers[-1]
        found = layer(
            hidden,
            position_embeddings=base.rotary_emb(hidden, positions[None]),
            attention_mask=future[None, None],
            position_ids=positions[None],
        )
        return (found if isinstance(found, Tensor) else found[0])[0]

    def own_feature(self, output: Tensor) -> Tensor:
        return output if self.family.startswith("glm") else self.norm(output, self.joining["shared_head.norm"])

    def logits(self, output: Tensor) -> Tensor:
        normed = self.norm(output, self.joining["shared_head.norm"])
        return (self.whole.lm_head.weight.detach() @ normed)[: checkpoints.VOCAB_SIZE]

    def guessed(self, tokens: list[int], states: Tensor, path: list[int], first: int = 1) -> Tensor:
        """Logits of the last token's row, then of a chain of guesses below it.  # [1 + len(path), vocab]"""
        features, found = states, []
        for depth in range(len(path) + 1):
            output = self.outputs([*tokens, *path[:depth]], features, first)[-1]
            found.append(self.logits(output))
            features = torch.cat([features, self.own_feature(output)[None]])
        return torch.stack(found)


def build(family: str, num_layers: int, **changes: Any) -> Any:
    """A model with this number of layers; the last one has attention over all tokens, and experts."""
    if family.startswith("qwen"):
        changes = {"layer_types": [*_KINDS, "full_attention"][:num_layers], **changes}
    return checkpoints.build(family, num_hidden_layers=num_layers, **changes)


def write(family: str, path: Path, own_shared: bool = False, **changes: Any) -> Reference:
    """A random target with its MTP layer at `path`. `own_shared`: with copies of embedding and output layer, too."""
    num_layers = NUM_LAYERS[family]
    whole, target = build(family, num_layers + 1, **changes), build(family, num_layers, **changes)
    target.load_state_dict(whole.state_dict(), strict=False)
    target.generation_config.eos_token_id = checkpoints.EOS
    whole.save_pretrained(path / "whole")
    target.save_pretrained(path)
    (path / "tokenizer.json").write_text(checkpoints.tokenizer_json())
    random, size = torch.Generator().manual_seed(7), whole.config.hidden_size
    around = 0.0 if family.startswith("qwen") else 1.0
    joining = {
        name: around + 0.2 * torch.randn(size, generator=random) for name in ("enorm", "hnorm", "shared_head.norm")
    }
    joining["eh_proj"] = 0.25 * torch.randn(size, 2 * size, generator=random)
    stored = load_file(path / "model.safetensors")
    for name, tensor in load_file(path / "whole/model.safetensors").items():
        if name.startswith(f"model.layers.{num_layers}."):
            stored[_published(family, name, num_layers)] = tensor
    beside = {f"{name}.weight": tensor for name, tensor in joining.items()}
    if own_shared:
        beside["embed_tokens.weight"] = whole.get_input_embeddings().weight.detach().clone()
        beside["shared_head.head.weight"] = whole.lm_head.weight.detach().clone()
    for name, tensor in beside.items():
        stored[_published(family, f"model.layers.{num_layers}.{name}", num_layers)] = tensor
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    return Reference(family, whole, joining)


def _published(family: str, name: str, num_layers: int) -> str:
    if not family.startswith("qwen"):
        return name
    inner = name.removeprefix(f"model.layers.{num_layers}.")
    module = inner.rpartition(".")[0]
    return f"mtp.{QWEN[module]}.weight" if module in QWEN else f"mtp.layers.0.{inner}"
