"""The attention function that Hugging Face models call, over block KV, for a flattened batch.

Computes what a plan describes; must not know tokens or sampling. Heads of grouped-query attention are packed into query
rows, so that each KV head is read once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from core.errors import UnsupportedModel
from workers.attention.latent import absorbed_query, expanded_output, is_latent
from workers.attention.paged import LayerKind, PagedPlan
from workers.step import AttentionGroup, LayerShape, Reads, StepPlan
from workers.step.kv_dtype import as_bits, store_rows

ATTENTION = "outrider"
"""The name under which transformers finds `attend`. No mask is registered under it, so models make none."""
NUMBER = "outrider_layer"
"""Name of the buffer that holds an attention module's layer number."""
READS_SOURCE = "outrider_reads_source"
"""Name of a module's attribute that is set if it is a decoder's cross-attention."""
DISTANCES = "outrider_distances"
"""Name of a module's attribute with each head's bias for the distance between query and key, for all layers.  # [H, D]

Stands for the dense position bias of the model's own code, which is for the rows of one text in order."""
_JIT: Any = torch.jit  # it has no types


class WholeText:
    """Used in place of a plan, by an encoder: each row of the batch attends to all of them, and no KV is written."""


WHOLE_TEXT = WholeText()


@dataclass(slots=True)
class LayerProbe:
    """Used in place of a plan, to record each layer's KV shapes and window."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)

    def record(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        *,
        values_in_keys: bool = False,
    ) -> torch.Tensor:
        """Record a layer. Returns zeros in the shape of its output.

        Raises: UnsupportedModel for a layer that attends twice.
        """
        if layer in self.shapes:
            raise UnsupportedModel(f"layer {layer} attends more than once")
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3], values_in_keys)
        self.windows[layer] = window
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kind: LayerKind,
        *,
        values_in_keys: bool = False,
    ) -> torch.Tensor:
        """`record`; recorders of more than shapes replace it."""
        return self.record(layer, query, key, value, kind.window, values_in_keys=values_in_keys)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,  # [1, H_kv, T, D]
    value: torch.Tensor,  # [1, H_kv, T, D_v]
    attention_mask: torch.Tensor | None,
    *,
    plan: StepPlan | PagedPlan | LayerProbe | WholeText | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write the step's KV, then let each row attend to the KV that the plan shows it.  # [1, T, H, D_v]

    Raises: UnsupportedModel if the model asks for something that a plan cannot express.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if is_latent(module):
        query = absorbed_query(module, query)
    if isinstance(plan, WholeText):
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=position_bias, scale=scale)
        return output.transpose(1, 2), None
    output = _run(
        module, query, key, value, attention_mask, plan, position_bias, (scale, sliding_window, softcap, s_aux)
    )
    return expanded_output(module, output) if is_latent(module) else output, None


def _run(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    plan: StepPlan | PagedPlan | LayerProbe | None,
    position_bias: torch.Tensor | None,
    kind: tuple[float, int | None, float | None, torch.Tensor | None],
) -> torch.Tensor:
    """`attend` for a `kind` of layer (`LayerKind`), by an operator where the model's code is recorded."""
    if torch.compiler.is_dynamo_compiling():  # compiled code must not read values that differ between layers
        return torch.ops.outrider.attend_in(query, key, value, module.get_buffer(NUMBER), *kind)  # type: ignore[no-any-return]
    layer: int = module.layer_idx  # type: ignore[assignment]  # torch types a module's attributes as Tensor | Module
    if hasattr(module, READS_SOURCE) and isinstance(plan, LayerProbe):
        return query.transpose(1, 2)
    if hasattr(module, READS_SOURCE) and isinstance(plan, StepPlan):
        return Attention(*kind).read_source(layer, plan, query)
    distances = getattr(module, DISTANCES, None)
    if attention_mask is not None or (position_bias is not None and distances is None):
        raise UnsupportedModel(f"layer {layer} brings its own attention mask or position bias")
    if not getattr(module, "is_causal", True):
        raise UnsupportedModel(f"layer {layer} is bidirectional; only causal attention is supported")
    if is_recorded():  # recorded code gets its plan from `operators`
        return torch.ops.outrider.attend(query, key, value, layer, *kind)  # type: ignore[no-any-return]
    if plan is None:
        raise UnsupportedModel("the model does not pass keyword arguments on to its attention layers")
    if isinstance(plan, LayerProbe):
        return plan.attend(layer, query, key, value, LayerKind(*kind), values_in_keys=is_latent(module))
    return Attention(*kind, distances).run_layer(layer, plan, query, key, value)


def number_layers(model: torch.nn.Module) -> None:
    """Store each attention module's layer number as a host tensor, for code that layers share."""
    for module in list(model.modules()):
        if isinstance(index := getattr(module, "layer_idx", None), int):
            module.register_buffer(NUMBER, torch.tensor(index), persistent=False)


def is_recorded() -> bool:
    """Whether the model's code is being recorded. Code that needs the step's plan is then an operator."""
    return torch.compiler.is_exporting() or bool(_JIT.is_tracing())


@dataclass(frozen=True, slots=True)
class Attention(LayerKind):
    """Computes the attention of layers of this kind."""

    def run_layer(
        self, layer: int, plan: StepPlan | PagedPlan, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Write the layer's KV, then attend; shapes as in `attend`.  # [1, T, H, D_v]"""
        if isinstance(plan, PagedPlan):
            if plan.can_see(self.window):
                pools = plan.cache.keys[layer], plan.cache.values[layer]
                plan.kernel.store(*pools, key, value, plan.write_slots)
                return plan.kernel.attend(query[0].transpose(0, 1), *pools, plan.reads, self)[None]
            plan = plan.gathering
        keys, values = plan.cache.by_head[layer]  # [1, H_kv, S, D]
        store_rows(keys, plan.write_slots, key)
        own_values = None if plan.cache.shapes[layer].values_in_keys else values
        if own_values is not None:
            store_rows(own_values, plan.write_slots, value)
        return self._read(plan.reads, query, keys, own_values, value.shape[3])

    def read_source(self, layer: int, plan: StepPlan, query: torch.Tensor) -> torch.Tensor:
        """Let each row attend to its source.  # [1, H, T, D] -> [1, T, H, D_v]"""
        keys, values = plan.cache.by_head[layer]
        return self._read(plan.source_reads, query, keys, values, values.shape[3])

    def _read(
        self, reads: Reads, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None, value_dim: int
    ) -> torch.Tensor:
        outputs = [self._group_output(group, query, keys, values, value_dim) for group in reads.groups]
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return joined if reads.row_order is None else joined.index_select(1, reads.row_order)

    def _group_output(
        self,
        group: AttentionGroup,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        value_dim: int,
    ) -> torch.Tensor:
        """The attention of one group's rows; values are the beginnings of keys if None.  # [1, B*R, H, D_v]"""
        num_seqs, num_queries, _ = group.mask.shape
        num_heads, num_kv_heads = query.shape[1], keys.shape[1]
        heads_per_row = num_heads // num_kv_heads
        rows = query if group.query_rows is None else query.index_select(2, group.query_rows)
        by_reader = rows.reshape(num_kv_heads, heads_per_row, num_seqs, num_queries, -1)  # [H_kv, G, B, R, D]
        packed = by_reader.permute(2, 0, 3, 1, 4).reshape(num_seqs, num_kv_heads, num_queries * heads_per_row, -1)
        if self.distances is None:
            bias = group.bias(self.window, heads_per_row, query.dtype)
        else:  # of models with a KV head for each head
            bias = group.bias_by_distance(self.window, self.distances)
        read = _gather(keys, group).to(query.dtype)
        read_values = read[..., :value_dim] if values is None else _gather(values, group).to(query.dtype)
        output = self._attention(packed, read, read_values, bias)
        unpacked = output.view(num_seqs, num_kv_heads, num_queries, heads_per_row, -1).transpose(1, 2)
        return unpacked.reshape(1, num_seqs * num_queries, num_heads, -1)

    def _attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        is_fused = self.softcap is None and self.sinks is None and k.shape[3] == v.shape[3]
        if len(q) > 1 and k.stride(0) == 0 and not is_fused:  # otherwise shared keys would be copied for each product
            each = [slice(product, product + 1) for product in range(len(q))]
            return torch.cat([self._products(q[one], k[one], v[one], bias[one]) for one in each])
        return self._products(q, k, v, bias)

    def _products(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if self.softcap is None and self.sinks is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale)
        scores = torch.matmul(q, k.transpose(2, 3)) * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        return torch.matmul(self._softmax((scores + bias).float()).to(v.dtype), v)

    def _softmax(self, scores: torch.Tensor) -> torch.Tensor:
        """Softmax over the keys and, for heads with one, an attention sink (a key without a value)."""
        if self.sinks is None:
            return torch.softmax(scores, dim=-1)
        num_seqs, num_kv_heads, num_rows, _ = scores.shape
        sinks = self.sinks.float().view(1, num_kv_heads, 1, -1)
        sinks = sinks.expand(num_seqs, -1, num_rows // sinks.shape[3], -1).reshape(num_seqs, num_kv_heads, num_rows, 1)
        return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]


def _gather(pool: torch.Tensor, group: AttentionGroup) -> torch.Tensor:
    """KV rows of each product of a group, from a pool [1, H, S, D]; a view if they are contiguous.  # [B, H, L, D]"""
    num_products, _, num_slots = group.mask.shape
    dtype, pool = pool.dtype, as_bits(pool)
    if isinstance(group.stretches, slice):
        found = pool.narrow(2, group.stretches.start, num_slots)
    else:
        slots = pool[0].transpose(0, 1)
        stretches = slots.view(-1, group.stretch_tokens, *slots.shape[1:])  # [N, S, H, D]
        found = stretches.index_select(0, group.stretches).view(-1, num_slots, *stretches.shape[2:]).transpose(1, 2)
    found = found.view(dtype)
    return found if len(found) == num_products else found.expand(num_products, -1, -1, -1)  # tiles read the same KV


AttentionInterface.register(ATTENTION, attend)
