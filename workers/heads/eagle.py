"""EAGLE heads: a few transformer layers that guess tokens one after another, from the target's hidden states.

The row of token i reads the embedding of token i and the feature of token i - 1: the target's hidden states for a token
that is committed, the head's own output for one that it guessed. It says which token may follow token i. Its position
is i - 1, and token 0 has no row.

Sources: Li et al. 2024 (arXiv 2401.15077), 2025 (arXiv 2503.01840), and their code (`cnets.py`). Attention is the
runtime's (`workers.attention`), so a row may be a node of a tree.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from workers.attention import Attention, PagedPlan
from workers.heads.eagle_files import EagleConfig, load_tensors
from workers.step import LayerShape, StepPlan


class EagleHead(nn.Module):
    """Computes rows of an EAGLE head. Operators are few, because on a CPU each costs more than its numbers."""

    def __init__(
        self,
        config: EagleConfig,
        tensors: Mapping[str, Tensor],
        embedding: nn.Module,
        output: nn.Module,
        vocab_size: int,
    ) -> None:
        """`tensors`: those of `config.shapes()`. `output` gives logits of the guessable tokens. `vocab_size`: number of
        token ids."""
        super().__init__()
        self.config = config
        self.num_parameters = sum(tensor.numel() for tensor in tensors.values())
        self._embedding, self._output = embedding, output
        self._layers = [_Layer(config, number, tensors) for number in range(config.num_layers)]
        self._tensors = {name: each for name, each in tensors.items() if not name.startswith("layers.")}
        rotary = LlamaRotaryEmbedding(config.rope).to(tensors["fc.weight"].device)
        self._inv_freq, self._rope_scale = rotary.inv_freq, float(rotary.attention_scaling)
        self._vocab_size = vocab_size
        self._token_ids = token_ids_of(tensors)

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """Shapes of a row's storage: KV of each layer, then its output, which is the feature of guesses below it."""
        config = self.config
        kv = LayerShape(config.num_kv_heads, config.head_dim, config.head_dim)
        return (*[kv] * config.num_layers, LayerShape(1, config.hidden_size, 0))

    def features_of(self, states: Tensor) -> Tensor:
        """Features from the target's hidden states.  # [T, layers * target hidden] -> [T, hidden]"""
        if not self.config.is_eagle3:
            return states
        norms = [self._tensors.get(f"fc_norm.{index}.weight") for index in range(len(self.config.feature_layers))]
        if norms[0] is not None:
            parts = states.chunk(len(norms), dim=-1)
            states = torch.cat([self._norm(part, norm) for part, norm in zip(parts, norms, strict=True)], dim=-1)
        states = self._norm(states, self._tensors.get("input_norm.weight"))
        return F.linear(states, self._tensors["fc.weight"], self._tensors.get("fc.bias"))

    def forward(self, ids: Tensor, positions: Tensor, features: Tensor, plan: StepPlan | PagedPlan) -> Tensor:
        """Outputs of all rows, after writing their KV.  # [T], [T], [T, hidden] -> [T, hidden]"""
        embedded = self._embedding(ids)
        angles = positions[:, None, None] * self._inv_freq
        cos, sin = ((turned * self._rope_scale).to(features.dtype) for turned in (angles.cos(), angles.sin()))
        if self.config.is_eagle3:
            hidden = self._layers[0].first(embedded, features, cos, sin, plan)
        else:
            joined = torch.cat([embedded, features], dim=-1)
            joined = F.linear(joined, self._tensors["fc.weight"], self._tensors.get("fc.bias"))
            hidden = self._layers[0].next(joined, cos, sin, plan)
        for layer in self._layers[1:]:
            hidden = layer.next(hidden, cos, sin, plan)
        return hidden

    def own_features(self, outputs: Tensor) -> Tensor:
        """Features of guesses from the outputs of the rows above them."""
        return self._norm(outputs, self._tensors.get("norm.weight")) if self.config.norm_output else outputs

    def logits(self, outputs: Tensor) -> Tensor:
        """float32 logits over the target's vocabulary; -inf for a token that it cannot guess.  # [W, vocab]"""
        normed = self._norm(outputs, self._tensors.get("norm.weight"))
        logits: Tensor = self._output(normed).float()
        if self.config.logit_scale != 1.0:
            logits *= self.config.logit_scale
        if self._token_ids is None:
            return logits[:, : self._vocab_size]
        full = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return full.index_copy_(1, self._token_ids, logits)[:, : self._vocab_size]

    def _norm(self, states: Tensor, weight: Tensor | None) -> Tensor:
        return states if weight is None else F.rms_norm(states, weight.shape, weight, self.config.norm_eps)


class _Layer:
    """One transformer layer, with its projections of equal input joined."""

    def __init__(self, config: EagleConfig, number: int, tensors: Mapping[str, Tensor]) -> None:
        self._config, self._number = config, number
        prefix = f"layers.{number}."
        self._own = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
        self._qkv, self._qkv_bias = self._joined("self_attn", ("q_proj", "k_proj", "v_proj"))
        self._gate_up, _ = self._joined("mlp", ("gate_proj", "up_proj"))
        self._attention = Attention(config.head_dim**-0.5, config.windows[number])

    def _joined(self, part: str, names: tuple[str, ...]) -> tuple[Tensor, Tensor | None]:
        weights = [self._own.pop(f"{part}.{name}.weight") for name in names]
        biases = [self._own.pop(f"{part}.{name}.bias", None) for name in names]
        if all(bias is None for bias in biases):
            return torch.cat(weights), None
        filled = [w.new_zeros(len(w)) if bias is None else bias for w, bias in zip(weights, biases, strict=True)]
        return torch.cat(weights), torch.cat(filled)

    def first(self, embedded: Tensor, features: Tensor, cos: Tensor, sin: Tensor, plan: StepPlan | PagedPlan) -> Tensor:
        """The first layer of EAGLE-3, which reads embedding and feature side by side.  # [T, hidden]"""
        normed = self._norm(features, "hidden_norm")
        side_by_side = torch.cat([self._norm(embedded, "input_layernorm"), normed], dim=-1)
        residual = normed if self._config.norm_before_residual else features
        return self._rest(side_by_side, residual, cos, sin, plan)

    def next(self, hidden: Tensor, cos: Tensor, sin: Tensor, plan: StepPlan | PagedPlan) -> Tensor:
        """Any other layer. The first one of EAGLE-1 has no norm before attention.  # [T, hidden]"""
        name = "hidden_norm" if "hidden_norm.weight" in self._own else "input_layernorm"
        return self._rest(self._norm(hidden, name), hidden, cos, sin, plan)

    def _rest(self, read: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, plan: StepPlan | PagedPlan) -> Tensor:
        attended = self._attend(read, cos, sin, plan)
        hidden = residual + F.linear(
            attended, self._own["self_attn.o_proj.weight"], self._own.get("self_attn.o_proj.bias")
        )
        gate, up = F.linear(self._norm(hidden, "post_attention_layernorm"), self._gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, self._own["mlp.down_proj.weight"])

    def _attend(self, read: Tensor, cos: Tensor, sin: Tensor, plan: StepPlan | PagedPlan) -> Tensor:
        config, num_rows = self._config, len(read)
        num_heads, num_kv = config.num_heads, config.num_kv_heads
        heads = F.linear(read, self._qkv, self._qkv_bias).view(num_rows, num_heads + 2 * num_kv, config.head_dim)
        turned, value = heads[:, : num_heads + num_kv], heads[:, num_heads + num_kv :]
        if "self_attn.q_norm.weight" in self._own:
            query, key = turned[:, :num_heads], turned[:, num_heads:]
            turned = torch.cat([self._norm(query, "self_attn.q_norm"), self._norm(key, "self_attn.k_norm")], dim=1)
        left, right = turned.chunk(2, dim=-1)
        turned = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
        query, key = turned[:, :num_heads], turned[:, num_heads:]
        shaped = (part.transpose(0, 1)[None] for part in (query, key, value))  # [1, H, T, D]
        return self._attention.run_layer(self._number, plan, *shaped).view(num_rows, -1)

    def _norm(self, states: Tensor, name: str) -> Tensor:
        weight = self._own.get(f"{name}.weight")
        return states if weight is None else F.rms_norm(states, weight.shape, weight, self._config.norm_eps)


def load_eagle(
    config: EagleConfig, path: str, embedding: nn.Module, output: nn.Module, vocab_size: int, dtype: torch.dtype
) -> EagleHead:
    """Load a head that `read_eagle` accepts. It borrows the target's `embedding` and rows of its `output` layer if it
    has none of its own.

    Raises: CheckpointError for missing, foreign or damaged tensors.
    """
    tensors = load_tensors(config, path, dtype, embedding.weight.device)  # type: ignore[arg-type]  # torch's types
    if "embed_tokens.weight" in tensors:
        embedding = _embedding(tensors["embed_tokens.weight"])
    token_ids = token_ids_of(tensors)
    if "lm_head.weight" in tensors:
        output = _linear(tensors["lm_head.weight"])
    elif token_ids is not None:
        output = _linear(output.weight.detach()[token_ids])  # type: ignore[operator]  # torch's types
    return EagleHead(config, tensors, embedding, output, vocab_size)


def token_ids_of(tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Token id of each row of the output layer; None if rows are those of the target."""
    offsets = tensors.get("d2t")
    return None if offsets is None else torch.arange(len(offsets), device=offsets.device) + offsets.long()


def _embedding(weight: Tensor) -> nn.Embedding:
    layer = nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer
