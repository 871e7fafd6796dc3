"""Runs forward passes: prefill chunks, plain steps, chains and trees of guesses, of many sequences in one pass.

Knows the model and its KV. Must not know how a pass is run (`workers.runtime.backend` does), sampling, sessions or
which guesses are right: it returns logits, and the caller rolls back by `cache.truncate` or `cache.compact`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic

import torch

from core.config import EngineConfig
from core.errors import CheckpointError
from core.records import Findings
from workers.attention import Kernel, find_kernel
from workers.model import LoadedModel
from workers.runtime.backend import BackendContext
from workers.runtime.backend_stack import BackendStack, choose
from workers.runtime.memory import bytes_beside_kv, num_kv_blocks
from workers.runtime.self_test import SelfTest
from workers.runtime.tiling import choose_tiling, find_tile_rows, tiles_of
from workers.step import KVCache, Step, StepRows, flatten

logger = logging.getLogger(__name__)

SLOW_ROWS = 64
"""A pass with more rows is timed once: compared with it, the cost of a kernel's first use is small."""


class ModelRuntime:
    """A loaded model and the KV of its sequences."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        cache_type: type[KVCache] = KVCache,
        kernel: Kernel | None = None,
        stack_type: Callable[..., BackendStack] = BackendStack,
        all_min: Callable[[int], int] = int,
    ) -> None:
        """`kernel`: attention kernel; None for the device's own. `all_min` returns the smallest of the numbers that the
        model's ranks pass to it. Raises: StartupError without memory for KV."""
        tiling, kinds = choose_tiling(config), choose(config)
        for kind in kinds:
            kind.prepare_weights(loaded.model, config)
        taken = partial(bytes_beside_kv, loaded.model, config)
        num_blocks = num_kv_blocks(config, loaded.layers, loaded.model.dtype, all_min, taken)
        self.info = replace(loaded.info, kv_cache_tokens=num_blocks * config.block_tokens)
        logger.info("KV of %d tokens", self.info.kv_cache_tokens)
        device = torch.device(config.device)
        self.cache = cache_type(loaded.layers, num_blocks, config.block_tokens, loaded.model.dtype, device)
        kernel = kernel or find_kernel(self.cache, is_deterministic=config.deterministic)
        self.context = BackendContext(loaded.model, self.cache, kernel, config, self.info.max_context_tokens, tiling)
        self.backends = stack_type(kinds, self.context, all_min)
        self._num_embeddings: int = loaded.model.get_input_embeddings().num_embeddings

    @property
    def num_free_tokens(self) -> int:
        """Number of tokens that fit into free blocks; the last block of a sequence may have room for more."""
        return self.cache.num_free_blocks * self.cache.block_tokens

    @property
    def num_eager_steps(self) -> int:
        """Number of steps since the warm-up that no compiled backend ran although `compile` is set."""
        return self.backends.num_base_steps if self.context.config.compile else 0

    @property
    def arithmetic(self) -> str:
        """Hardware and software that the last bits of logits depend on, besides weights and dtype."""
        config, device = self.context.config, torch.device(self.context.config.device)
        is_cpu = device.type == "cpu"
        hardware = torch.backends.cpu.get_cpu_capability() if is_cpu else torch.cuda.get_device_name(device)
        threads = f"; {config.num_threads} threads" if is_cpu else ""
        backends = " > ".join(self.backends.names)
        weights = f"; weights in {config.quantize}" if config.quantize else ""
        return f"{hardware}; torch {torch.__version__}; {backends}; {config.tensor_parallel} ranks{threads}{weights}"

    @torch.inference_mode()
    def forward(self, batch: Sequence[StepRows]) -> torch.Tensor:
        """Append all rows to their sequences' KV. Returns float32 logits of the wanted rows.  # [rows, vocab]

        Logits are in batch order. By default each sequence has those of its last token and its new nodes.
        Raises: OutOfBlocks, before anything is changed.
        """
        self._check(batch)
        self.cache.reserve_all((item.kv, item.kv.num_tokens + item.num_rows) for item in batch)
        step = flatten(batch)
        assert min(step.ids) >= 0, f"token id {min(step.ids)}"
        assert max(step.ids) < self._num_embeddings, f"token id {max(step.ids)} of {self._num_embeddings}"
        logits = _cut(self.run(self._padded(step)), len(step.wanted), self.info.vocab_size)
        for span in step.spans:
            self.cache.extend(span.kv, span.num_rows)
        return logits

    def run(self, step: Step) -> torch.Tensor:
        """Write the step's KV. Returns float32 logits of its wanted rows.  # [rows, vocab]"""
        assert max(step.positions) < self.info.max_context_tokens, "a position beyond the model's context"
        return _cut(self.backends.run(step), len(step.wanted), self.info.vocab_size).float()

    def close(self) -> None:
        """Stop the ranks that follow this runtime, if there are any."""
        self.backends.close()

    def warm_up(
        self, progress: Callable[[str], None] = logger.info, machine: str = "", known: Findings | None = None
    ) -> Findings:
        """Build backends and use each kernel once, so that no request pays for it. Returns what was measured.

        First, compiled backends are built. Second, in deterministic mode, a search finds the smallest tiles that keep a
        row's bits. Third, a step of each power of two rows is run and timed. `known` findings from an engine on this
        `machine` with the same kind of backend replace the search and the timing.
        Raises: CheckpointError for a model that gives NaN.
        """
        self.backends.warm_up_base(progress)
        self.backends.build_all(self._self_test(), self.info.name, progress)
        if known is not None and self._accepts(known, machine):
            self._time(1)
        else:
            known = self._measure(machine)
        self.backends.num_base_steps = 0
        return known

    def _accepts(self, known: Findings, machine: str) -> bool:
        """Whether these findings hold here. If so, their tiles are used from now on."""
        if (known.machine, known.is_compiled) != (machine, self.backends.is_compiled):
            return False
        if self.context.config.deterministic:
            if known.tile_rows is None:  # search again, so that each start logs the warning
                return False
            self.context.tiling = tiles_of(known.tile_rows, self.cache.device)
        return True

    def _measure(self, machine: str) -> Findings:
        tile_rows = self._settle_tiling() if self.context.config.deterministic else None
        num_rows, limit = 1, self._max_rows()
        times_s: dict[int, float] = {}
        while num_rows <= limit:
            for _ in range(1 if num_rows > SLOW_ROWS else 2):  # the first time includes first uses of kernels
                times_s[num_rows] = self._time(num_rows)
            num_rows *= 2
        return Findings(machine, self.backends.is_compiled, tile_rows, tuple(times_s.items()))

    def _settle_tiling(self) -> int | None:
        """Use the smallest tile in which a row's bits do not depend on other rows. Returns its rows, or None."""
        tile_rows = find_tile_rows(self.context, self._self_test())
        while tile_rows is None and self.backends.is_compiled:
            self.backends.drop(self.info.name, "its bits depend on the number of rows")
            tile_rows = find_tile_rows(self.context, self._self_test())
        if tile_rows is None:
            logger.warning(
                "deterministic is NOT met with %s on this %s: a row's bits depend on the other rows, and outputs may "
                "differ where two tokens are nearly equal (as with mixtures of experts, where the number of rows of "
                "an expert depends on the other rows)",
                self.info.architecture,
                self.cache.device.type.upper(),
            )
        return tile_rows

    def _time(self, num_rows: int) -> float:
        kv = self.cache.new_sequence()
        began_s = monotonic()
        logits = self.forward([StepRows(kv, [0] * num_rows)])
        is_sound = bool(logits.isfinite().any())  # this waits for the device
        took_s = monotonic() - began_s
        if not is_sound:
            raise CheckpointError(
                f"{self.info.name} gives NaN for {num_rows} rows: weights are damaged, or need another dtype"
            )
        self.cache.free(kv)
        return took_s

    def _self_test(self) -> SelfTest:
        return SelfTest(self.forward, self.cache, self._max_rows(), self.info.vocab_size)

    def _max_rows(self) -> int:
        """Largest number of rows that a step of one sequence can have now."""
        return min(self.context.config.max_step_tokens, self.num_free_tokens, self.info.max_context_tokens)

    def _check(self, batch: Sequence[StepRows]) -> None:
        assert batch, "an empty step"
        assert len({id(item.kv) for item in batch}) == len(batch), "a sequence may be in a step once"
        for item in batch:
            assert item.num_rows > 0, "a step of a sequence has a row at least"
            assert not (item.tokens and item.num_cached_nodes), "tokens come before the nodes of a tree"
            has_root = bool(item.tokens or not item.tree.tokens)
            assert 0 <= item.num_cached_nodes <= item.kv.num_tokens - (not has_root), "a tree has a root"

    def _padded(self, step: Step) -> Step:
        """Pad a step with rows of token 0, and its wanted rows with row 0."""
        num_rows, num_wanted = (self.context.tiling.rows(len(rows)) for rows in (step.ids, step.wanted))
        padding = [0] * (num_rows - len(step.ids))
        wanted = step.wanted + [0] * (num_wanted - len(step.wanted))
        return Step(step.ids + padding, step.positions + padding, wanted, step.spans)


def _cut(logits: torch.Tensor, num_rows: int, vocab_size: int) -> torch.Tensor:
    """The first rows and tokens of `logits`; `logits` itself if it has no others, because a slice costs an operator."""
    return logits if logits.shape == (num_rows, vocab_size) else logits[:num_rows, :vocab_size]
