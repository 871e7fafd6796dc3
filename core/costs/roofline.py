"""Memory and time that a model of a known shape needs on named GPUs, before it has run there.

A step reads the weights and the KV at the memory's pace, then multiplies at the pace of the arithmetic; ranks add two
all-reduces a layer. `MEMORY_PACE` and `ARITHMETIC_PACE` are what an H200 reached of its data sheet with the shape of an
8B model in bfloat16 (docs/adr/gpu-runtime.md): one row 4.60 ms, 32 rows 5.77 ms (5.6 by this law), 2,048 rows 46.7 ms.
Other GPUs, ranks and mixtures of experts have not been measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType

from core.costs.pass_law import PassLaw

GB = 10**9
MEMORY_PACE, ARITHMETIC_PACE = 0.73, 0.7
ALL_REDUCE_S = 17e-6
"""Time of one small all-reduce between the GPUs of a node by NCCL's ring, as published: 2.7 ms for the 160 of a 70B."""
KV_SHARE = 0.9
"""Share of a GPU's memory for weights, a step and KV (`kv_memory_share`)."""
ROW_BYTES_A_FEATURE = 48
"""Memory for activations of one row, over the width of the model."""
LOGIT_BYTES = 6
MAX_TOKENS = (1 << 31) - 1
"""Tokens of a model without attention, whose number no memory limits."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Rows at which a law is computed."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's data sheet (dense bfloat16), and a round price of renting it for an hour."""

    memory_gb: float
    memory_tb_s: float
    tflops: float
    dollars: float
    capability: tuple[int, int]
    """Compute capability."""


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "l4": Gpu(24, 0.30, 121, 0.7, (8, 9)),
        "a10g": Gpu(24, 0.60, 125, 1.0, (8, 6)),
        "l40s": Gpu(48, 0.864, 362, 1.5, (8, 9)),
        "a100": Gpu(80, 2.04, 312, 2.0, (8, 0)),
        "h100": Gpu(80, 3.35, 989, 3.0, (9, 0)),
        "h200": Gpu(141, 4.8, 989, 3.8, (9, 0)),
        "b200": Gpu(180, 8.0, 2250, 5.5, (10, 0)),
        "b300": Gpu(270, 8.0, 2250, 6.5, (10, 3)),
    }
)


@dataclass(frozen=True, slots=True)
class KVShape:
    """Heads and dimensions of what one layer stores for a token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def values(self, num_ranks: int) -> int:
        """Numbers for a token on one rank. Ranks beyond the number of heads hold copies."""
        return ceil(self.num_kv_heads / num_ranks) * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Figures of a model that determine its memory and time."""

    num_parameters: int
    num_expert_parameters: int
    """Parameters of routed experts. A row uses `expert_share` of them."""
    expert_share: float
    hidden_size: int
    vocab_size: int
    layers: tuple[KVShape, ...]
    value_bytes: int
    """Bytes of a weight."""
    state_bytes: int = 0
    """Bytes of one state of all recurrent layers; 0 without such layers."""
    kv_value_bytes: int = 2
    """Bytes of a number of the KV."""

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * self.value_bytes

    @property
    def num_active(self) -> float:
        """Parameters that one row is multiplied with."""
        return self.num_parameters - self.num_expert_parameters * (1 - self.expert_share)

    def kv_bytes(self, num_ranks: int = 1) -> int:
        """Bytes of one token's KV on one rank."""
        return sum(layer.values(num_ranks) for layer in self.layers) * self.kv_value_bytes

    def read_bytes(self, num_rows: int) -> float:
        """Bytes of weights that a step reads. Rows choose their experts independently of each other."""
        unused = (1 - self.expert_share) ** num_rows
        return (self.num_parameters - self.num_expert_parameters * unused) * self.value_bytes

    def step_bytes(self, num_rows: int) -> int:
        """Bytes for the activations and logits of a step."""
        return num_rows * (self.hidden_size * ROW_BYTES_A_FEATURE + self.vocab_size * LOGIT_BYTES)


@dataclass(frozen=True, slots=True)
class Placed:
    """A model on `count` GPUs of one kind: its ranks."""

    model: ModelShape
    gpu: Gpu
    count: int = 1

    def kv_tokens(self, max_step_tokens: int) -> int:
        """Tokens whose KV fits beside the weights and a step, and beside as many bytes of recurrent states, if any.

        Below 0 if weights and a step do not fit by themselves.
        """
        room, of_token = self._room(max_step_tokens), self.model.kv_bytes(self.count)
        if not of_token:
            return MAX_TOKENS if room > 0 else -1
        return int(room / (2 if self.model.state_bytes else 1) // of_token)

    def num_states(self, max_step_tokens: int) -> int:
        """States of recurrent layers that fit beside the weights, a step and KV; 0 for a model without such layers."""
        if not self.model.state_bytes:
            return 0
        room = self._room(max_step_tokens) / (2 if self.model.kv_bytes(self.count) else 1)
        return max(0, int(room // self.model.state_bytes))

    def _room(self, max_step_tokens: int) -> float:
        """Bytes for KV and states on each GPU."""
        taken = self.model.weight_bytes / self.count + self.model.step_bytes(max_step_tokens)
        return self.gpu.memory_gb * GB * KV_SHARE - taken

    def step_s(self, num_rows: int, context_tokens: int = 0) -> float:
        """Seconds of a step with `num_rows` rows, of sequences with `context_tokens` tokens together."""
        model = self.model
        read = model.read_bytes(num_rows) / self.count + context_tokens * model.kv_bytes(self.count)
        memory_s = read / (self.gpu.memory_tb_s * 1e12 * MEMORY_PACE)
        arithmetic_s = 2 * model.num_active * num_rows / (self.count * self.gpu.tflops * 1e12 * ARITHMETIC_PACE)
        between_s = 2 * len(model.layers) * ALL_REDUCE_S if self.count > 1 else 0.0
        return memory_s + arithmetic_s + between_s

    def law(self, context_tokens: int = 0, rows: Sequence[int] = ROWS) -> PassLaw:
        """Duration of a pass by its rows."""
        return PassLaw(tuple((num_rows, self.step_s(num_rows, context_tokens)) for num_rows in rows))

    @property
    def dollars(self) -> float:
        """Price of an hour."""
        return self.gpu.dollars * self.count
