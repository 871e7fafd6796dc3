"""Runs a head with KV (EAGLE, MTP) in place of a model: rows of committed tokens from the target's features, rows of
guesses from its own.

Has the part of `workers.runtime.runtime.ModelRuntime` that engines use. A head's rows are those of its tokens but the
first ones: token 0 has no feature before it, and a message may not bring the features of a whole prefix. Rows are
stored from the beginning of a sequence's blocks, so attention sees no gap. Must not know sessions or messages.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import ClassVar

import torch
from torch import Tensor

from core.config import EngineConfig
from core.errors import first_line
from core.records import Features, Findings, ModelInfo
from core.speculation import ROOT
from workers.attention import PagedPlan, find_kernel, paged_inputs
from workers.heads import HeadWithKV
from workers.runtime.backend_stack import ALLOWED_ERROR
from workers.runtime.heads.native_head import NativeHead, native_code_of_head
from workers.runtime.memory import num_kv_blocks
from workers.runtime.runtime import Scores
from workers.runtime.self_test import TREE, largest_error
from workers.step import NO_TILING, KVCache, SequenceKV, Span, Step, StepPlan, StepRows, plan_step, upload

logger = logging.getLogger(__name__)
_TRIED = 8
"""Tokens of the comparison with native code."""
_TIMED_ROWS = (1, 2, 4, 8, 16, 32, 64)


class KVHeadRuntime:
    """A head with KV, and the KV of its sequences."""

    num_eager_steps = 0
    max_depth: ClassVar[int] = sys.maxsize

    def __init__(self, head: HeadWithKV, info: ModelInfo, config: EngineConfig) -> None:
        """`info` is the target's. Raises: StartupError without memory for KV."""
        device, dtype = torch.device(config.device), getattr(torch, config.dtype)
        taken = head.num_parameters * dtype.itemsize + 8 * config.max_step_tokens * info.vocab_size
        num_blocks = num_kv_blocks(config, head.shapes, dtype, taken_bytes=lambda: taken)
        self.cache = KVCache(head.shapes, num_blocks, config.block_tokens, dtype, device)
        self.arithmetic = "head"
        self.info = replace(
            info,
            name=head.config.name,
            architecture=type(head).__name__,
            num_parameters=head.num_parameters,
            kv_cache_tokens=num_blocks * config.block_tokens,
            layers=(),
            feature_layers=head.config.feature_layers,
            feature_width=head.config.feature_width,
            reads_prefix=True,
        )
        self._head, self._tokens, self._config = head, head.tokens, config
        self._num_columns = head.num_columns
        self._run: Callable[[Step, Tensor], tuple[Tensor, Tensor]] = self._run_eager
        self._kernel = find_kernel(self.cache)
        self._max_rows = min(config.max_step_tokens, self.info.kv_cache_tokens, self.info.max_context_tokens)

    def scores(self, batch: Sequence[StepRows]) -> Scores:
        if self._tokens is None:
            return Scores(self.forward(batch))
        return Scores(self._scores(batch), tokens=self._tokens)

    @torch.inference_mode()
    def forward(self, batch: Sequence[StepRows]) -> Tensor:
        """Float32 logits of the wanted rows, in `ModelRuntime.forward`'s order.  # [rows, vocab]"""
        return self._head.logits_of(self._scores(batch))

    @torch.inference_mode()
    def _scores(self, batch: Sequence[StepRows]) -> Tensor:
        """Float32 scores of the tokens that it can guess.  # [rows, draft vocab]"""
        self.cache.reserve_all((item.kv, item.kv.num_tokens + item.num_rows) for item in batch)
        rows = _Rows(self.cache, self._head.mask_token)
        for item in batch:
            rows.add(item)
        scores = self._computed(rows) if rows.ids else torch.empty(0, self._num_columns, device=self.cache.device)
        for item in batch:
            self.cache.extend(item.kv, item.num_rows)
        return scores

    def _computed(self, rows: _Rows) -> Tensor:
        step = Step(rows.ids, rows.positions, rows.wanted, rows.spans)
        outputs, scores = self._run(step, self._features(rows))
        self.cache.keys[-1].index_copy_(0, upload(rows.slots, self.cache.device), outputs[:, None])
        return scores

    def _run_eager(self, step: Step, features: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of all rows, and scores of the wanted ones.  # [T, hidden], [W, draft vocab]"""
        plan: StepPlan | PagedPlan
        if self._kernel is None:
            plan = plan_step(self.cache, step.spans, len(step.ids), NO_TILING)
            ids, positions, wanted = step.tensors(self.cache.device)
        else:
            ids, positions, wanted, plan = paged_inputs(step, self.cache, self._kernel, NO_TILING)
        outputs = self._head(ids, positions, features, plan)
        return outputs, self._head.scores(outputs if len(wanted) == len(outputs) else outputs[wanted])

    def _features(self, rows: _Rows) -> Tensor:
        """The feature of each row: the target's of the token before it, or the output of the row above a guess.

        # [T, hidden]
        """
        device, dtype = self.cache.device, self.cache.keys[-1].dtype
        parts = []
        if rows.states:
            states = torch.frombuffer(bytearray(b"".join(rows.states)), dtype=torch.bfloat16)
            states = upload(states.view(-1, self.info.feature_width), device)
            parts.append(self._head.features_of(states.to(dtype)))
        if rows.above:
            outputs = self.cache.keys[-1][:, 0].index_select(0, upload(rows.above, device))
            parts.append(self._head.own_features(outputs))
        if len(parts) == 1:
            return parts[0]
        order = upload([*rows.committed, *rows.guessed], device)
        joined = torch.cat(parts)
        return torch.empty_like(joined).index_copy_(0, order, joined)

    def logits_of(self, kv: SequenceKV) -> Tensor:
        """Logits of all rows that a sequence has.  # [rows, vocab]"""
        slots = [self.cache.slot(kv, row) for row in range(kv.num_tokens - kv.num_rowless)]
        outputs = self.cache.keys[-1][:, 0].index_select(0, upload(slots, self.cache.device))
        return self._head.logits_of(self._head.scores(outputs))

    def warm_up(
        self,
        progress: Callable[[str], None],
        machine: str = "",
        known: Findings | None = None,  # noqa: ARG002
    ) -> Findings:
        """Build native code, use each kernel once, and time it."""
        is_tried = self._max_rows > _TRIED + len(TREE)
        if is_tried and (native := native_code_of_head(self._head, self._config)) is not None:
            self._use(NativeHead(native, self.cache, self.info.max_context_tokens), progress)
        times = [(rows, self._time(rows)) for rows in _TIMED_ROWS if rows < self._max_rows]
        return Findings(machine, False, None, tuple(times))

    def _use(self, native: NativeHead, progress: Callable[[str], None]) -> None:
        """Run native code from now on, if its logits are those of the head's own code."""
        want = self._tried()
        self._run = native.run
        try:
            off_by = largest_error(self._tried(), want)
            problem = f"a program's logits are off by {off_by:.2g}"
        except Exception as error:  # noqa: BLE001  of the compiler, or of what it has made
            off_by, problem = math.inf, first_line(error)
        if off_by <= ALLOWED_ERROR[self.cache.keys[-1].dtype]:
            progress(f"a step of the head is a program, run by {native.num_threads} threads")
            return
        self._run = self._run_eager
        logger.warning("%s is run by its own code: %s", self.info.name, problem)

    def _tried(self) -> Tensor:
        """Scores of some tokens and of guesses below them."""
        kv, width = self.cache.new_sequence(), self.info.feature_width
        states = torch.randn(_TRIED, width, generator=torch.Generator().manual_seed(0)).bfloat16()
        features = Features(0, width, states.view(torch.int16).numpy().tobytes())
        steps = (
            StepRows(kv, [0, 1, 2], features=features),
            StepRows(kv, range(_TRIED - 2), features=features),
            StepRows(kv, [], TREE.prefix(2)),
            StepRows(kv, [], TREE, 2),
        )
        scores = torch.cat([self._scores([step]) for step in steps])
        self.cache.free(kv)
        return scores

    def _time(self, num_rows: int) -> float:
        kv, width = self.cache.new_sequence(), self.info.feature_width
        features = Features(0, width, bytes(2 * width * num_rows))
        for _ in range(2):  # the first time includes first uses of kernels
            began_s = monotonic()
            self.forward([StepRows(kv, [0] * (num_rows + 1), features=features)]).isfinite().any().item()
            took_s = monotonic() - began_s
            self.cache.truncate(kv, 0)
        self.cache.free(kv)
        return took_s

    def build_more(self, *, is_idle: bool) -> bool:  # noqa: ARG002
        """Heads build all at start."""
        return False

    def close(self) -> None:
        """Heads have no other ranks."""


@dataclass(eq=False, slots=True)
class _Rows:
    """The rows of a step."""

    cache: KVCache
    mask_token: int | None
    """Token that guesses are read as; None for themselves."""
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    """The KV slot of each row."""
    states: list[bytes] = field(default_factory=list)
    """The target's features for rows of committed tokens."""
    committed: list[int] = field(default_factory=list)
    """Rows of committed tokens."""
    above: list[int] = field(default_factory=list)
    """Slot of the row above each guess."""
    guessed: list[int] = field(default_factory=list)
    """Rows of guesses."""

    def add(self, item: StepRows) -> None:
        if item.tokens:
            assert not item.tree.tokens, "guesses are fed once their root is computed"
            self._add_tokens(item)
        else:
            self._add_guesses(item)

    def _add_span(self, span: Span) -> None:
        self.spans.append(span)
        self.slots += self.cache.slots(span.kv, span.num_kv - span.num_rows, span.num_kv)

    def _add_tokens(self, item: StepRows) -> None:
        """Rows of committed tokens, from the first whose feature is known."""
        kv, features = item.kv, item.features
        assert features is not None, "the engine refuses requests without features"
        held, end = kv.num_tokens, kv.num_tokens + len(item.tokens)
        if held < kv.num_rowless or features.first > held - 1:
            kv.num_rowless = features.first + 1  # nothing before is known, or it has gone
        first = max(held, kv.num_rowless)
        if first >= end:
            return
        self._add_span(Span(_stored(kv, first), len(self.ids), end - first))
        self.committed += range(len(self.ids), len(self.ids) + end - first)
        self.ids += item.tokens[first - held :]
        self.positions += range(first - 1, end - 1)
        begin, row_bytes = first - 1 - features.first, 2 * features.width
        self.states.append(features.rows[begin * row_bytes : (begin + end - first) * row_bytes])
        if item.wants_logits:
            self.wanted.append(len(self.ids) - 1)

    def _add_guesses(self, item: StepRows) -> None:
        """Rows of new guesses, below rows that earlier steps have computed."""
        kv, cached, parents = item.kv, item.num_cached_nodes, item.tree.parents
        root = kv.num_tokens - cached - 1
        rows = _stored(kv, kv.num_tokens)
        self._add_span(Span(rows, len(self.ids), 0, tuple(parents), cached))
        for parent in parents[cached:]:
            assert parent < cached, "a guess is fed after the one above it"
            self.above.append(self.cache.slot(rows, root - kv.num_rowless + (0 if parent == ROOT else 1 + parent)))
        self.guessed += range(len(self.ids), len(self.ids) + len(parents) - cached)
        self.wanted += range(len(self.ids), len(self.ids) + len(parents) - cached)
        own = item.tree.tokens[cached:]
        self.ids += own if self.mask_token is None else [self.mask_token] * len(own)
        self.positions += [root - 1 + depth for depth in item.tree.depths[cached:]]


def _stored(kv: SequenceKV, num_tokens: int) -> SequenceKV:
    """The rows of a sequence's first tokens, as they lie in its blocks."""
    return SequenceKV(kv.blocks, num_tokens - kv.num_rowless)
