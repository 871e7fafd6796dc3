"""Runs heads that read one state in place of a model, for a draft engine: guesses from features that requests carry.

Has the part of `workers.runtime.runtime.ModelRuntime` that engines use. Heads that read one state keep nothing of a
row, so the KV pages only count rows. Must not know sessions or messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import monotonic

import torch
from torch import Tensor

from core.config import EngineConfig
from core.records import Findings, ModelInfo
from workers.heads import EagleConfig, MtpConfig, StateHeads, load_eagle, load_head, load_mtp_head, read_head
from workers.model import loader
from workers.runtime.heads.kv_head_runtime import KVHeadRuntime
from workers.runtime.memory import num_kv_blocks
from workers.runtime.runtime import Scores
from workers.step import KVCache, LayerShape, StepRows, upload

_NO_KV = (LayerShape(1, 1, 1),)
DEFAULT_ROWS = 1 << 20
"""Tokens of all sessions together, where `kv_cache_tokens` sets no limit: a row takes eight bytes."""
_TIMED_ROWS = (1, 2, 4, 8, 16, 32, 64)


class HeadRuntime:
    """Heads of a target, and the rows of its sequences."""

    num_eager_steps = 0

    def __init__(self, head: StateHeads, info: ModelInfo, config: EngineConfig) -> None:
        num_blocks = num_kv_blocks(replace(config, kv_cache_tokens=info.kv_cache_tokens), (), torch.float32)
        self.info = info
        self.cache = KVCache(_NO_KV, num_blocks, config.block_tokens, torch.float32, torch.device(config.device))
        self.max_depth = head.max_depth
        self.arithmetic = "head"
        self._head = head

    def scores(self, batch: Sequence[StepRows]) -> Scores:
        return Scores(self.forward(batch))

    @torch.inference_mode()
    def forward(self, batch: Sequence[StepRows]) -> Tensor:
        """Float32 logits of the wanted rows, in `ModelRuntime.forward`'s order.  # [rows, vocab]"""
        self.cache.reserve_all((item.kv, item.kv.num_tokens + item.num_rows) for item in batch)
        rows = [(_state_of(item), depth) for item in batch if item.wants_logits for depth in _depths(item)]
        for item in batch:
            self.cache.extend(item.kv, item.num_rows)
        logits = torch.empty(len(rows), self.info.vocab_size, device=self.cache.device)
        for depth in {depth for _, depth in rows}:
            index = [row for row, (_, of_row) in enumerate(rows) if of_row == depth]
            states = upload(torch.stack([rows[row][0] for row in index]), self.cache.device)
            logits[upload(index, self.cache.device)] = self._head(states, depth)[:, : self.info.vocab_size]
        return logits

    def warm_up(
        self,
        progress: Callable[[str], None],  # noqa: ARG002
        machine: str = "",
        known: Findings | None = None,  # noqa: ARG002
    ) -> Findings:
        """Use each kernel once, and time it."""
        return Findings(machine, False, None, tuple((rows, self._time(rows)) for rows in _TIMED_ROWS))

    @torch.inference_mode()
    def _time(self, num_rows: int) -> float:
        features = torch.zeros(num_rows, self.info.feature_width, device=self.cache.device)
        for _ in range(2):  # the first time includes first uses of kernels
            began_s = monotonic()
            self._head(features, 0).isfinite().any().item()  # this waits for the device
        return monotonic() - began_s

    def build_more(self, *, is_idle: bool) -> bool:  # noqa: ARG002
        """Heads build all at start."""
        return False

    def close(self) -> None:
        """Heads have no other ranks."""


def load_head_runtime(config: EngineConfig, progress: Callable[[str], None]) -> HeadRuntime | KVHeadRuntime:
    """Load the head of `config.head`, with what it borrows of the target in `config.model`. Raises: StartupError."""
    assert config.head is not None
    head_config = read_head(config.head, config.model)
    if isinstance(head_config, MtpConfig):
        mtp, one_layer = load_mtp_head(head_config, config, progress)
        return KVHeadRuntime(mtp, one_layer.info, config)
    loaded = loader.load(replace(config, layers=(0,), compile=False), progress)  # for its embedding and output layer
    model = loaded.model
    head_config.check_target(model.config.hidden_size, model.config.vocab_size)
    progress(f"loading the head {head_config.name}")
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(head_config, EagleConfig):
        eagle = load_eagle(head_config, config.head, embedding, output, loaded.info.vocab_size, model.dtype)
        return KVHeadRuntime(eagle, loaded.info, config)
    head = load_head(config.head, output, model.dtype, torch.device(config.device))
    info = replace(
        loaded.info,
        name=head_config.name,
        architecture=type(head).__name__,
        num_parameters=sum(weight.numel() for weight in head.parameters()),
        kv_cache_tokens=config.kv_cache_tokens or DEFAULT_ROWS,
        layers=(),
        feature_layers=head_config.feature_layers,
        feature_width=head_config.feature_width,
    )
    return HeadRuntime(head, info, config)


def _state_of(item: StepRows) -> Tensor:
    """The last hidden state that the request carries."""
    assert item.features is not None, "the engine refuses requests without features"
    row = bytearray(item.features.rows[-2 * item.features.width :])
    return torch.frombuffer(row, dtype=torch.bfloat16)


def _depths(item: StepRows) -> Iterator[int]:
    """Depths of the wanted rows: 0 of the last token, then those of the new nodes."""
    if item.tokens:
        yield 0
    yield from item.tree.depths[item.num_cached_nodes :]
