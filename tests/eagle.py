"""Random EAGLE heads in their published formats, and their algorithm in plain torch, row by row, to compare with.

The algorithm is written from the papers and the authors' code (`cnets.py`), without anything of `workers`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import checkpoints

HIDDEN, VOCAB = checkpoints.SIZES["hidden_size"], checkpoints.SIZES["vocab_size"]
NUM_DRAFT = 120
LAYER_IDS = [0, 1, 2]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "draft_vocab_size": NUM_DRAFT,
    "max_position_embeddings": 64,
    "eagle_aux_hidden_state_layer_ids": LAYER_IDS,
}
OWN = ("embed_tokens.weight", "lm_head.weight")
"""Tensors that a head may borrow from its target."""


def tensors_of(config: dict[str, Any], seed: int = 0, num_tokens: int = checkpoints.VOCAB_SIZE) -> dict[str, Tensor]:
    """Random tensors of an EAGLE-3 head, by the authors' names, for guesses of the first `num_tokens` tokens."""
    random = torch.Generator().manual_seed(seed)

    def some(*shape: int, scale: float = 0.25) -> Tensor:
        return scale * torch.randn(*shape, generator=random)

    def norm(size: int) -> Tensor:
        return 1 + some(size, scale=0.2)

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    found = {"fc.weight": some(hidden, 3 * config.get("target_hidden_size", hidden)), "norm.weight": norm(hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix, width = (f"layers.{layer}.", hidden) if layer else ("midlayer.", 2 * hidden)
        found[f"{prefix}self_attn.q_proj.weight"] = some(queries, width)
        found[f"{prefix}self_attn.k_proj.weight"] = some(keys, width)
        found[f"{prefix}self_attn.v_proj.weight"] = some(keys, width)
        found[f"{prefix}self_attn.o_proj.weight"] = some(hidden, queries)
        found[f"{prefix}mlp.gate_proj.weight"] = some(inner, hidden)
        found[f"{prefix}mlp.up_proj.weight"] = some(inner, hidden)
        found[f"{prefix}mlp.down_proj.weight"] = some(hidden, inner)
        found[f"{prefix}input_layernorm.weight"] = norm(hidden)
        found[f"{prefix}post_attention_layernorm.weight"] = norm(hidden)
        if not layer:
            found[f"{prefix}hidden_norm.weight"] = norm(hidden)
    found["embed_tokens.weight"] = some(config["vocab_size"], hidden, scale=1.0)
    found["lm_head.weight"] = some(config["draft_vocab_size"], hidden)
    if config["draft_vocab_size"] != config["vocab_size"]:
        chosen = torch.randperm(num_tokens, generator=random)[: config["draft_vocab_size"]].sort().values
        found["d2t"] = chosen - torch.arange(len(chosen))
        found["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, chosen, True)
    return found


def write(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str = "model.safetensors") -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, path / file) if file.endswith(".safetensors") else torch.save(stored, path / file)
    return str(path)


def head_at(path: Path, num_tokens: int = checkpoints.VOCAB_SIZE, **changes: Any) -> tuple[str, dict[str, Tensor]]:
    """A random head, written as its authors do, without an embedding of its own; and its tensors."""
    config = {**CONFIG, **changes}
    tensors = tensors_of(config, num_tokens=num_tokens)
    del tensors["embed_tokens.weight"]
    return write(path, config, tensors), tensors


def sure_head_at(path: Path, target: Path, tokens: Sequence[int]) -> str:
    """A head of random weights that can guess these tokens alone, and thinks them equally likely: so that it is right
    wherever one of them comes, if all its guesses are verified."""
    sizes = json.loads((target / "config.json").read_text())
    shape = {"hidden_size": sizes["hidden_size"], "vocab_size": sizes["vocab_size"], "draft_vocab_size": len(tokens)}
    tensors = tensors_of({**CONFIG, **shape})
    del tensors["embed_tokens.weight"]
    chosen = torch.tensor(sorted(tokens))
    tensors["d2t"] = chosen - torch.arange(len(chosen))
    tensors["t2d"] = torch.zeros(sizes["vocab_size"], dtype=torch.bool).index_fill_(0, chosen, True)
    tensors["lm_head.weight"] *= 0.0
    return write(path, {**CONFIG, **shape}, tensors)


@dataclass
class Reference:
    """One sequence, computed row by row. Every row keeps its own keys and values."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    embedding: Tensor
    output: Tensor
    keys: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)
    """By row, then by layer."""
    outputs: list[Tensor] = field(default_factory=list)

    def norm(self, states: Tensor, name: str) -> Tensor:
        if name not in self.tensors:
            return states
        variance = states.pow(2).mean(-1, keepdim=True)
        return self.tensors[name] * (states * torch.rsqrt(variance + self.config["rms_norm_eps"]))

    def feature(self, states: Tensor) -> Tensor:
        """From the target's hidden states of one token, low layer first."""
        if "fc_norm.0.weight" in self.tensors:
            parts = [self.norm(part, f"fc_norm.{index}.weight") for index, part in enumerate(states.chunk(3))]
            states = torch.cat(parts)
        return self.tensors["fc.weight"] @ self.norm(states, "input_norm.weight")

    def turned(self, heads: Tensor, position: int) -> Tensor:
        """RoPE.  # [heads, D]"""
        half = heads.shape[-1] // 2
        theta = self.config.get("rope_theta", 10000.0)
        angles = position * theta ** (-torch.arange(half) / half)
        cos, sin = torch.cat([angles, angles]).cos(), torch.cat([angles, angles]).sin()
        return heads * cos + torch.cat([-heads[:, half:], heads[:, :half]], dim=-1) * sin

    def row(self, token: int, feature: Tensor, position: int, seen: list[int]) -> int:
        """Compute a row that sees the rows `seen` and itself. Returns its number."""
        embedded = self.embedding[token]
        self.keys.append([])
        hidden = self._layer(0, "midlayer.", embedded, feature, position, seen)
        for layer in range(1, self.config["num_hidden_layers"]):
            hidden = self._layer(layer, f"layers.{layer}.", None, hidden, position, seen)
        self.outputs.append(hidden)
        return len(self.outputs) - 1

    def _layer(self, layer, prefix, embedded, feature, position, seen):
        config, weights = self.config, self.tensors
        residual = feature
        if embedded is not None:
            normed = self.norm(feature, f"{prefix}hidden_norm.weight")
            read = torch.cat([self.norm(embedded, f"{prefix}input_layernorm.weight"), normed])
            residual = normed if config.get("norm_before_residual") else feature
        else:
            read = self.norm(feature, f"{prefix}input_layernorm.weight")
        shaped = []
        for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
            made = weights[f"{prefix}self_attn.{name}_proj.weight"] @ read
            made = made + weights.get(f"{prefix}self_attn.{name}_proj.bias", 0.0)
            made = made.view(config[heads], -1)
            if name != "v":
                made = self.turned(self.norm(made, f"{prefix}self_attn.{name}_norm.weight"), position)
            shaped.append(made)
        query, key, value = shaped
        self.keys[-1].append((key, value))
        rows = [*seen, len(self.keys) - 1]
        keys = torch.stack([self.keys[row][layer][0] for row in rows], 1)
        values = torch.stack([self.keys[row][layer][1] for row in rows], 1)
        group = len(query) // len(key)
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)  # [H, rows, D]
        chances = torch.softmax((keys @ query[..., None])[..., 0] * query.shape[-1] ** -0.5, -1)
        attended = (chances[:, None] @ values).reshape(-1)
        hidden = residual + weights[f"{prefix}self_attn.o_proj.weight"] @ attended
        read = self.norm(hidden, f"{prefix}post_attention_layernorm.weight")
        gate, up = (weights[f"{prefix}mlp.{name}_proj.weight"] @ read for name in ("gate", "up"))
        return hidden + weights[f"{prefix}mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)

    def masked(self, count: int, seen: list[int], position: int) -> list[Tensor]:
        """Logits of P-EAGLE's guesses after the first, in one pass of mask rows below the rows `seen`."""
        feature, token = self.feature(self.tensors["mask_hidden"][0]), self.config["mask_token_id"]
        rows = list(seen)
        for number in range(count):
            rows.append(self.row(token, feature, position + number, rows[:]))
        return [self.logits(row) for row in rows[len(seen) :]]

    def own_feature(self, row: int) -> Tensor:
        output = self.outputs[row]
        return self.norm(output, "norm.weight") if self.config.get("norm_output") else output

    def logits(self, row: int) -> Tensor:
        """Over the target's vocabulary."""
        weight = self.tensors.get("lm_head.weight")
        offsets = self.tensors.get("d2t")
        chosen = torch.arange(VOCAB) if offsets is None else offsets + torch.arange(len(offsets))
        weight = self.output[chosen] if weight is None else weight
        full = torch.full((VOCAB,), -torch.inf)
        full[chosen] = weight @ self.norm(self.outputs[row], "norm.weight")
        return full[: checkpoints.VOCAB_SIZE]

    def commit(self, tokens: list[int], states: Tensor, first: int = 1) -> list[int]:
        """Rows of the tokens from `first` on, from the target's states of the tokens before.  # [tokens, 3 * hidden]"""
        seen: list[int] = []
        for index in range(first, len(tokens)):
            seen.append(self.row(tokens[index], self.feature(states[index - 1]), index - 1, seen[:]))
        return seen


FIRST_CONFIG: dict[str, Any] = {
    key: value for key, value in CONFIG.items() if key not in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
}
"""Configuration of a head of EAGLE-1 or EAGLE-2. Their heads are alike; they differ in how trees grow."""


def first_tensors_of(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of an EAGLE-1 head, as published: with an embedding, without final norm and output layer."""
    made = tensors_of({**config, "draft_vocab_size": config["vocab_size"]}, seed)
    found = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in made.items()}
    for name in ("layers.0.input_layernorm", "layers.0.hidden_norm", "norm", "lm_head"):
        del found[f"{name}.weight"]
    hidden = config["hidden_size"]
    for name in "qkv":  # the first layer is no wider than the others
        found[f"layers.0.self_attn.{name}_proj.weight"] = found[f"layers.0.self_attn.{name}_proj.weight"][:, :hidden]
    found["fc.weight"] = found["fc.weight"][:, : 2 * hidden]
    found["fc.bias"] = found["layers.0.post_attention_layernorm.weight"] - 1
    return found


@dataclass
class FirstReference(Reference):
    """The same of EAGLE-1 and EAGLE-2 (`cnets1.py`)."""

    def feature(self, states: Tensor) -> Tensor:
        return states

    def row(self, token: int, feature: Tensor, position: int, seen: list[int]) -> int:
        self.keys.append([])
        joined = torch.cat([self.embedding[token], feature])
        hidden = self.tensors["fc.weight"] @ joined + self.tensors.get("fc.bias", 0.0)
        for layer in range(self.config["num_hidden_layers"]):  # layer 0 has no norm before its attention
            hidden = self._layer(layer, f"layers.{layer}.", None, hidden, position, seen)
        self.outputs.append(hidden)
        return len(self.outputs) - 1

    def own_feature(self, row: int) -> Tensor:
        return self.outputs[row]

    def logits(self, row: int) -> Tensor:
        return (self.output @ self.outputs[row])[: checkpoints.VOCAB_SIZE]
