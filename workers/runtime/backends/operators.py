"""Operators through which recorded code calls back into Python: attention, packed products, and sums over ranks.

They need the step's plan, the model's packed products and its shard, which are not tensors. So a thread sets
them for each pass.
Knows torch's operator registry. Must not know models.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from workers.attention import Attention
from workers.model import ModelShard
from workers.runtime.backend import Plan
from workers.runtime.backends.packed_weights import PackedProduct

_pass = threading.local()


@contextmanager
def operator_context(plan: Plan, products: Sequence[PackedProduct], shard: ModelShard | None = None) -> Iterator[None]:
    """Set what this thread's operators use within the `with` block."""
    _pass.plan, _pass.products, _pass.shard = plan, products, shard
    try:
        yield
    finally:
        del _pass.plan, _pass.products, _pass.shard


_LIBRARY: Any = torch.library.Library("outrider", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("linear(Tensor rows, int index, int num_outputs) -> Tensor")
_KIND = "float scale, int? window, float? softcap, Tensor? sinks"
_LIBRARY.define(f"attend(Tensor query, Tensor key, Tensor value, int layer, {_KIND}) -> Tensor")
_LIBRARY.define(f"attend_in(Tensor query, Tensor key, Tensor value, Tensor layer, {_KIND}) -> Tensor")

_LIBRARY.define("all_reduce(Tensor(a!) rows) -> ()")
_LIBRARY.define("all_gather(Tensor rows, int num_ranks) -> Tensor")


def _linear(rows: Tensor, index: int, num_outputs: int) -> Tensor:  # noqa: ARG001
    output: Tensor = _pass.products[index].multiply(rows)
    return output


def _attend(
    query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, window: int | None, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    output = Attention(scale, window, softcap, sinks).run_layer(layer, _pass.plan, query, key, value)
    return output.contiguous()  # compiled code relies on the declared layout


def _attend_in(query: Tensor, key: Tensor, value: Tensor, layer: Tensor, *kind: Any) -> Tensor:
    """`_attend` with the layer's number as a host tensor, so that compiled layers share their code."""
    return _attend(query, key, value, int(layer), *kind)


def _attended(query: Tensor, _: Tensor, value: Tensor, *__: Any) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def _all_reduce(rows: Tensor) -> None:
    total = _pass.shard.collectives.all_reduce(rows)
    if total is not rows:
        rows.copy_(total)


def _all_gather(rows: Tensor, num_ranks: int) -> Tensor:  # noqa: ARG001
    gathered: Tensor = _pass.shard.collectives.all_gather(rows)
    return gathered


_LIBRARY.impl("linear", _linear, "CPU")
_LIBRARY.impl("linear", lambda rows, _, num_outputs: rows.new_empty(*rows.shape[:-1], num_outputs), "Meta")
for _name, _code, _shape in (
    ("attend", _attend, _attended),
    ("attend_in", _attend_in, _attended),
    ("all_reduce", _all_reduce, lambda _: None),
    ("all_gather", _all_gather, lambda rows, num_ranks: rows.new_empty(*rows.shape[:-1], num_ranks * rows.shape[-1])),
):
    _LIBRARY.impl(_name, _code, "CPU")
    _LIBRARY.impl(_name, _code, "CUDA")
    _LIBRARY.impl(_name, _shape, "Meta")
