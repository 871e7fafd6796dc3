"""EAGLE heads: a few transformer layers that guess tokens one after another, from the target's hidden states.

The row of token i reads the embedding of token i and the feature of token i - 1: the target's hidden states for a token
that is committed, the head's own output for one that it guessed. It says which token may follow token i. Its position
is i - 1, and token 0 has no row. A row of a head for parallel drafting (P-EAGLE) reads a mask's
embedding and feature where others read a guess.

Sources: Li et al. 2024 (arXiv 2401.15077), 2025 (arXiv 2503.01840), and their code (`cnets.py`). Attention is the
runtime's (`workers.attention`), so a row may be a node of a tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from workers.attention import Attention, LayerProbe, PagedPlan
from workers.heads.eagle_files import EagleConfig, load_tensors
from workers.sampling import DraftVocabulary
from workers.step import LayerShape, StepPlan

Plan: TypeAlias = StepPlan | PagedPlan | LayerProbe


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
        self._embedding, self.output = embedding, output
        self.num_columns: int = output.weight.shape[0]  # type: ignore[assignment, index]  # torch's types
        """Number of the tokens that it can guess."""
        self._layers = nn.ModuleList(_Layer(config, number, tensors) for number in range(config.num_layers))
        self._fc = _linear(tensors["fc.weight"], tensors.get("fc.bias"))
        self._norms = {name: each for name, each in tensors.items() if "norm" in name and "layers." not in name}
        rotary = LlamaRotaryEmbedding(config.rope).to(tensors["fc.weight"].device)
        self._inv_freq, self._rope_scale = rotary.inv_freq, float(rotary.attention_scaling)
        self._vocab_size, self._token_ids = vocab_size, token_ids_of(tensors)
        mask = tensors.get("mask_hidden")
        self._mask_feature = None if mask is None else self.features_of(mask)

    @property
    def tokens(self) -> DraftVocabulary | None:
        """The tokens of the columns of `scores`; None if some of them are padding, or if they are the target's."""
        token_ids = self._token_ids
        if token_ids is None or int(token_ids.max()) >= self._vocab_size:
            return None
        return DraftVocabulary(self._vocab_size, token_ids)

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """Shapes of a row's storage: KV of each layer, then its output, which is the feature of guesses below it."""
        config = self.config
        kv = LayerShape(config.num_kv_heads, config.head_dim, config.head_dim)
        return (*[kv] * config.num_layers, LayerShape(1, config.hidden_size, 0))

    @property
    def mask_token(self) -> int | None:
        """Token that rows of guesses read in place of their own."""
        return self.config.mask_token

    def features_of(self, states: Tensor) -> Tensor:
        """Features from the target's hidden states.  # [T, layers * target hidden] -> [T, hidden]"""
        if not self.config.is_eagle3:
            return states
        norms = [self._norms.get(f"fc_norm.{index}.weight") for index in range(len(self.config.feature_layers))]
        if norms[0] is not None:
            parts = states.chunk(len(norms), dim=-1)
            states = torch.cat([self._norm(part, norm) for part, norm in zip(parts, norms, strict=True)], dim=-1)
        features: Tensor = self._fc(self._norm(states, self._norms.get("input_norm.weight")))
        return features

    def forward(self, ids: Tensor, positions: Tensor, features: Tensor, plan: Plan) -> Tensor:
        """Outputs of all rows, after writing their KV.  # [T], [T], [T, hidden] -> [T, hidden]"""
        layers: Sequence[Any] = [*self._layers]
        first, *others = layers
        embedded = self._embedding(ids)
        angles = positions[:, None, None] * self._inv_freq
        cos, sin = ((turned * self._rope_scale).to(features.dtype) for turned in (angles.cos(), angles.sin()))
        if self.config.is_eagle3:
            hidden = first.first(embedded, features, cos, sin, plan)
        else:
            joined = self._fc(torch.cat([embedded, features], dim=-1))
            hidden = first.next(joined, cos, sin, plan)
        for layer in others:
            hidden = layer.next(hidden, cos, sin, plan)
        outputs: Tensor = hidden
        return outputs

    def own_features(self, outputs: Tensor) -> Tensor:
        """Features of guesses from the outputs of the rows above them; in parallel drafting the mask's."""
        if self._mask_feature is not None:
            return self._mask_feature.expand(len(outputs), -1)
        return self._norm(outputs, self._norms.get("norm.weight")) if self.config.norm_output else outputs

    def scores(self, outputs: Tensor) -> Tensor:
        """float32 logits of the tokens that it can guess.  # [W, draft vocab]"""
        logits: Tensor = self.output(self._norm(outputs, self._norms.get("norm.weight"))).float()
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    def logits_of(self, scores: Tensor) -> Tensor:
        """Logits over the target's vocabulary; -inf for a token that it cannot guess.  # [W, vocab]"""
        if self._token_ids is None:
            return scores[:, : self._vocab_size]
        full = scores.new_full((len(scores), self.config.vocab_size), -torch.inf)
        return full.index_copy_(1, self._token_ids, scores)[:, : self._vocab_size]

    def _norm(self, states: Tensor, weight: Tensor | None) -> Tensor:
        return states if weight is None else F.rms_norm(states, weight.shape, weight, self.config.norm_eps)


class _Layer(nn.Module):
    """One transformer layer, with its projections of equal input joined."""

    def __init__(self, config: EagleConfig, number: int, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._config, self._number = config, number
        prefix = f"layers.{number}."
        self._own = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
        self._qkv = self._joined("self_attn", ("q_proj", "k_proj", "v_proj"))
        self._attended = self._joined("self_attn", ("o_proj",))
        self._gate_up = self._joined("mlp", ("gate_proj", "up_proj"))
        self._down = self._joined("mlp", ("down_proj",))
        self._attention = Attention(config.head_dim**-0.5, config.windows[number])

    def _joined(self, part: str, names: tuple[str, ...]) -> nn.Linear:
        weights = [self._own.pop(f"{part}.{name}.weight") for name in names]
        biases = [self._own.pop(f"{part}.{name}.bias", None) for name in names]
        if all(bias is None for bias in biases):
            return _linear(torch.cat(weights))
        filled = [w.new_zeros(len(w)) if bias is None else bias for w, bias in zip(weights, biases, strict=True)]
        return _linear(torch.cat(weights), torch.cat(filled))

    def first(self, embedded: Tensor, features: Tensor, cos: Tensor, sin: Tensor, plan: Plan) -> Tensor:
        """The first layer of EAGLE-3, which reads embedding and feature side by side.  # [T, hidden]"""
        normed = self._norm(features, "hidden_norm")
        side_by_side = torch.cat([self._norm(embedded, "input_layernorm"), normed], dim=-1)
        residual = normed if self._config.norm_before_residual else features
        return self._rest(side_by_side, residual, cos, sin, plan)

    def next(self, hidden: Tensor, cos: Tensor, sin: Tensor, plan: Plan) -> Tensor:
        """Any other layer. The first one of EAGLE-1 and EAGLE-2 has no norm before attention.  # [T, hidden]"""
        name = "hidden_norm" if "hidden_norm.weight" in self._own else "input_layernorm"
        return self._rest(self._norm(hidden, name), hidden, cos, sin, plan)

    def _rest(self, read: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, plan: Plan) -> Tensor:
        hidden = residual + self._attended(self._attend(read, cos, sin, plan))
        gate, up = self._gate_up(self._norm(hidden, "post_attention_layernorm")).chunk(2, dim=-1)
        outputs: Tensor = hidden + self._down(F.silu(gate) * up)
        return outputs

    def _attend(self, read: Tensor, cos: Tensor, sin: Tensor, plan: Plan) -> Tensor:
        config, num_rows = self._config, len(read)
        num_heads, num_kv = config.num_heads, config.num_kv_heads
        heads = self._qkv(read).view(num_rows, num_heads + 2 * num_kv, config.head_dim)
        turned, value = heads[:, : num_heads + num_kv], heads[:, num_heads + num_kv :]
        if "self_attn.q_norm.weight" in self._own:
            query, key = turned[:, :num_heads], turned[:, num_heads:]
            turned = torch.cat([self._norm(query, "self_attn.q_norm"), self._norm(key, "self_attn.k_norm")], dim=1)
        left, right = turned.chunk(2, dim=-1)
        turned = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
        query, key = turned[:, :num_heads], turned[:, num_heads:]
        query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))  # [1, H, T, D]
        if isinstance(plan, LayerProbe):
            return plan.attend(self._number, query, key, value, self._attention).view(num_rows, -1)
        return self._attention.run_layer(self._number, plan, query, key, value).view(num_rows, -1)

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


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
