"""Paged attention for a GPU, which reads KV in place by block tables: what a step reads, and the plan of all layers.

`workers.attention.triton_attention` is the kernel. Knows a step's shape (`workers.step.paged_plan`); must not know
tokens or models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from workers.step import KVCache, Step, StepPlan, StepShape, Tiling, plan_step, upload


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The settings of a layer's attention."""

    scale: float
    window: int | None = None
    """Number of positions that a row sees, including its own; None for all."""
    softcap: float | None = None
    sinks: Tensor | None = None  # [H]
    distances: Tensor | None = None  # [H, D], `workers.attention.seam.DISTANCES`


@dataclass(frozen=True, slots=True)
class PagedReads:
    """The KV that each row of a step sees. `workers.step.paged_plan` explains the integers."""

    num_tiles: Tensor  # [1] int32
    tiles: Tensor  # [N, 4] int32
    seen: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    masks: Tensor  # [T, words] int32
    table: Tensor  # [S, blocks] int32
    block_tokens: int
    tile_rows: int


class Kernel(Protocol):
    """Attention over block tables. Rows are computed independently: NaN in one sequence does not affect others."""

    def store(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write the rows [1, H, T, D] to their slots of the pools [S, H, D]."""
        ...

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, reads: PagedReads, kind: LayerKind) -> Tensor:
        """Attention of rows [T, H, D] over pools [S, H_kv, D] and [S, H_kv, D_v].  # [T, H, D_v]

        Outputs of rows outside of all tiles are undefined.
        """
        ...


@dataclass(frozen=True)
class PagedPlan:
    """A step's plan for a kernel that reads KV by block tables."""

    cache: KVCache
    kernel: Kernel
    write_slots: Tensor  # [T] int32
    reads: PagedReads
    depth: int
    """Levels of the deepest tree of the step; 0 without trees."""
    gather: Callable[[], StepPlan]

    @cached_property
    def gathering(self) -> StepPlan:
        """The gathering plan, for layers that the kernel does not support; made when first needed."""
        return self.gather()

    def can_see(self, window: int | None) -> bool:
        """Whether the kernel supports this window. A node sees all its ancestors, so they must fit into the window."""
        return window is None or window > self.depth


def paged_inputs(
    step: Step, cache: KVCache, kernel: Kernel, tiling: Tiling
) -> tuple[Tensor, Tensor, Tensor, PagedPlan]:
    """Ids [T], positions [T], wanted rows [W] and the plan of a step, in its smallest shape; uploaded in one copy."""
    shape = StepShape.of(cache, step, tiling)
    values = upload(shape.fill(cache, step, tiling), cache.device)
    return inputs_in_shape(shape, values, cache, kernel, lambda: plan_step(cache, step.spans, len(step.ids), tiling))


def inputs_in_shape(
    shape: StepShape, values: Tensor, cache: KVCache, kernel: Kernel, gather: Callable[[], StepPlan]
) -> tuple[Tensor, Tensor, Tensor, PagedPlan]:
    """The result of `paged_inputs` for a step that `values` hold in this shape."""
    pieces = shape.cut(values)
    arrays = {name: pieces[name] for name in ("num_tiles", "tiles", "seen", "positions", "masks", "table")}
    reads = PagedReads(**arrays, block_tokens=shape.block_tokens, tile_rows=shape.tile_rows)
    plan = PagedPlan(cache, kernel, pieces["write_slots"], reads, shape.depth, gather)
    return pieces["ids"], pieces["positions"], pieces["wanted"], plan
