"""One forward pass for everything: prefill chunks, plain steps, chains and trees of guesses, of many sequences at once.

Knows the model and its KV. Must not know sampling, sessions or which guesses are right: it answers logits, and the
caller rolls back by `cache.truncate` or `cache.compact`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from time import monotonic

import torch

from core.config import EngineConfig
from core.errors import CheckpointError, ConfigError, first_line
from workers.attention import Kernel, PagedPlan, PagedStep, find_kernel
from workers.model import LoadedModel
from workers.runtime import compiled, packed_weights
from workers.runtime.compiled import CannotCompile, CompiledModel
from workers.runtime.cuda_graph import CapturedModel, CudaRecorder, Recorder
from workers.runtime.findings import Findings
from workers.runtime.memory import GIB, free_bytes, num_kv_blocks
from workers.runtime.self_test import Trials
from workers.step import KVCache, Step, StepPlan, StepRows, Tiling, lay_out, plan_step, upload

logger = logging.getLogger(__name__)

SLOW_ROWS = 64
"""Passes of more rows take so long that a first use adds little to them."""
NO_TILING = Tiling()
CPU_BFLOAT16 = Tiling(min_rows=4)
"""With fewer rows, a row's matrix products depend on how many there are, and four rows cost what one does. In float32
four cost half as much again, for differences in the last bits alone: who must not have those asks for deterministic."""

CPU_DETERMINISTIC = Tiling(min_rows=8, row_multiple=8, query_rows=4, kv_tokens=512, by_branch=True)
"""On a CPU torch's attention reads KV in blocks of 512, and its elementwise kernels treat the end of a tensor that is
no multiple of the vector width in another way: with whole blocks, rows by the eight, attention in products of four rows
each, and each branch of a tree read in the order of a chain, a row's bits are its own."""
FEWER_ROWS = (1, 4)
"""That may do as well where all weights are packed; whether they do is tried at start."""
LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Of compiled code, relative to the norm of a row's logits."""


def choose_tiling(config: EngineConfig) -> Tiling:
    """Raises: ConfigError when deterministic steps are asked for where there are none."""
    on_cpu = torch.device(config.device).type == "cpu"
    if not config.deterministic:
        return CPU_BFLOAT16 if on_cpu and config.dtype == "bfloat16" and packed_weights.has_bfloat16() else NO_TILING
    if not on_cpu:
        raise ConfigError(f"deterministic is available on cpu only, not on {config.device}")
    if CPU_DETERMINISTIC.kv_tokens % config.block_tokens:
        raise ConfigError(
            f"deterministic needs block_tokens to divide {CPU_DETERMINISTIC.kv_tokens}, got {config.block_tokens}"
        )
    return CPU_DETERMINISTIC


class ModelRuntime:
    """A loaded model and the KV of the sequences that it serves."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        cache_type: type[KVCache] = KVCache,
        kernel: Kernel | None = None,
        recorder: Recorder | None = None,
        least: Callable[[int], int] = int,
    ) -> None:
        """`kernel` and `recorder` are those that the device has, unless others are given. `least` answers the least of
        what all ranks say that share the model. Raises: StartupError where there is no room for KV."""
        self._model = loaded.model
        self._device = torch.device(config.device)
        self._num_embeddings: int = loaded.model.get_input_embeddings().num_embeddings
        self._tiling = choose_tiling(config)
        self._is_deterministic = config.deterministic
        self._is_to_be_compiled = config.compile
        self._compile_cache = config.compile_cache
        self._is_shared = config.tensor_parallel > 1
        self._compiled: CompiledModel | None = None
        self._captured: CapturedModel | None = None
        self._recorder = recorder
        self.num_eager_steps = 0
        """Steps since the warm-up that were to be compiled and are not."""
        self._pack(config.tensor_parallel)
        self._max_step_tokens = config.max_step_tokens
        num_blocks = num_kv_blocks(config, loaded.layers, loaded.model.dtype, least)
        self.info = replace(loaded.info, kv_cache_tokens=num_blocks * config.block_tokens)
        logger.info("KV of %d tokens", self.info.kv_cache_tokens)
        self.cache = cache_type(loaded.layers, num_blocks, config.block_tokens, loaded.model.dtype, self._device)
        self._kernel = kernel or find_kernel(self.cache)

    @property
    def num_free_tokens(self) -> int:
        """Room for KV in whole blocks; the last block of a sequence may have more."""
        return self.cache.num_free_blocks * self.cache.block_tokens

    @torch.inference_mode()
    def forward(self, batch: Sequence[StepRows]) -> torch.Tensor:
        """Append all rows to their sequences' KV; logits of each last token and of the new nodes.  # [rows, vocab]

        Sequences that want no logits have no rows in the answer, which is float32 and in batch order.
        Raises: OutOfBlocks, before anything is changed.
        """
        self._check(batch)
        self.cache.reserve_all((item.kv, item.kv.num_tokens + item.num_rows) for item in batch)
        step = lay_out(batch)
        assert min(step.ids) >= 0, f"token id {min(step.ids)}"
        assert max(step.ids) < self._num_embeddings, f"token id {max(step.ids)} of {self._num_embeddings}"
        logits = self.run(self._padded(step))[: len(step.wanted)]
        for item in batch:
            self.cache.extend(item.kv, item.num_rows)
        return logits

    def warm_up(
        self, progress: Callable[[str], None] = logger.info, machine: str = "", known: Findings | None = None
    ) -> Findings:
        """Make ready, so that no request pays for the first use of a kernel, and answer what was found out on the way.

        What is to be compiled is, first. Then, in deterministic mode, the smallest tiles that will do are looked for,
        and every size of step that is a power of two is run and timed; unless it is `known` of an engine on this
        `machine` that ran as this one does.
        Raises: CheckpointError for a model that gives NaN.
        """
        self.warm_up_products()
        if self._is_to_be_compiled and self._is_shared:
            self._do_without("several ranks share it")
        elif self._is_to_be_compiled:
            self._compile(progress)
        if known is not None and self._confirms(known, machine):
            self._time(1)
        else:
            known = self._find_out(machine)
        self.num_eager_steps = 0
        return known

    def _confirms(self, known: Findings, machine: str) -> bool:
        """Whether that holds here; its tiles are used from now on, then."""
        if (known.machine, known.is_compiled) != (machine, self._runs_compiled):
            return False
        if self._is_deterministic:
            if known.tile_rows is None:  # which is worth a warning each time
                return False
            self._tile_by(known.tile_rows)
        return True

    def _find_out(self, machine: str) -> Findings:
        tile_rows = self._settle_tiling() if self._is_deterministic else None
        num_rows, limit = 1, min(self._max_step_tokens, self.num_free_tokens, self.info.max_context_tokens)
        times_s: dict[int, float] = {}
        while num_rows <= limit:
            for _ in range(1 if num_rows > SLOW_ROWS else 2):  # the first time of all is not like the others
                times_s[num_rows] = self._time(num_rows)
            num_rows *= 2
        return Findings(machine, self._runs_compiled, tile_rows, tuple(times_s.items()))

    @property
    def _runs_compiled(self) -> bool:
        return self._compiled is not None or self._captured is not None

    def warm_up_products(self) -> None:
        """The part of it that each rank does by itself."""
        packed_weights.warm_up(self._model, SLOW_ROWS)

    def _time(self, num_rows: int) -> float:
        kv = self.cache.new_sequence()
        began_s = monotonic()
        logits = self.forward([StepRows(kv, [0] * num_rows)])
        is_sound = bool(logits.isfinite().any())  # and it is there, also where the device works on its own
        took_s = monotonic() - began_s
        if not is_sound:
            raise CheckpointError(f"{self.info.name} computes no numbers: a step of {num_rows} rows gives NaN")
        self.cache.free(kv)
        return took_s

    def _check(self, batch: Sequence[StepRows]) -> None:
        assert batch, "an empty step"
        assert len({id(item.kv) for item in batch}) == len(batch), "a sequence may be in a step once"
        for item in batch:
            assert item.num_rows > 0, "a step of a sequence has a row at least"
            assert not (item.tokens and item.num_held), "tokens come before the nodes of a tree"
            assert 0 <= item.num_held <= item.kv.num_tokens - bool(item.tree and not item.tokens), "a tree has a root"

    def run(self, step: Step) -> torch.Tensor:
        """Write the step's KV, and answer the logits of its wanted rows, float32.  # [rows, vocab]"""
        assert max(step.positions) < self.info.max_context_tokens, "a position beyond the model's context"
        logits = self._captured(step) if self._captured is not None else None
        if logits is None:
            logits = self._run(step)
        return logits[: len(step.wanted), : self.info.vocab_size].float()

    def _run(self, step: Step) -> torch.Tensor:
        """Logits of the wanted rows, and perhaps of others behind them.  # [rows or more, vocab]"""
        if self._kernel is not None:
            paged = PagedStep.lay_out(step, self.cache, self._kernel, self._tiling)
            return self._run_eagerly(paged.ids, paged.positions, paged.wanted, paged.plan)
        ids, positions, wanted = (
            upload(rows, self._device, torch.long) for rows in (step.ids, step.positions, step.wanted)
        )
        plan = plan_step(self.cache, step.spans, len(step.ids), self._tiling)
        if self._compiled is not None:
            return self._compiled(ids, positions, wanted, plan)
        return self._run_eagerly(ids, positions, wanted, plan)

    def _run_eagerly(
        self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor, plan: StepPlan | PagedPlan
    ) -> torch.Tensor:
        self.num_eager_steps += self._is_to_be_compiled
        output = self._model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=wanted, plan=plan
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def close(self) -> None:
        """Let go of whoever follows this runtime; nobody does where one process has the whole model."""

    def _pack(self, num_ranks: int) -> None:
        dtype = self._model.dtype
        if not packed_weights.is_available(dtype, self._device):
            if self._device.type == "cpu":
                logger.warning("no packed %s products on this CPU: verifying several tokens takes longer", dtype)
            return
        keeps_rows = not self._is_deterministic  # a row has to have the same bits in any company
        needed = packed_weights.bytes_needed(self._model, keeps_rows=keeps_rows)
        free = free_bytes(self._device, num_ranks)
        if needed and free is not None and needed > free // 2:
            logger.warning(
                "%s is not widened, so verifying several tokens takes longer: that needs %.1f GiB, and %.1f are free",
                *(dtype, needed / GIB, free / GIB),
            )
            return
        min_weights = 0 if self._is_deterministic else packed_weights.MIN_WEIGHTS
        num_packed, num_left = packed_weights.pack(self._model, min_weights, keeps_rows=keeps_rows)
        logger.info("%d linear layers packed, %d left as they are", num_packed, num_left)

    def _padded(self, step: Step) -> Step:
        """With rows of token 0 at the end, and row 0 as often as it takes."""
        num_rows, num_wanted = (self._tiling.rows(len(rows)) for rows in (step.ids, step.wanted))
        padding = [0] * (num_rows - len(step.ids))
        wanted = step.wanted + [0] * (num_wanted - len(step.wanted))
        return Step(step.ids + padding, step.positions + padding, wanted, step.spans)

    # Compiled code

    def _compile(self, progress: Callable[[str], None]) -> None:
        """Have steps run by native code or recordings, if they can be made and do what the model does; else say why
        not."""
        trials = self._trials()
        logits = trials.logits()
        try:
            if self._recorder is None and self._device.type == "cpu":
                folder = Path(self._compile_cache).expanduser()
                least_rows = 1 if self._is_deterministic else self._tiling.min_rows  # tiles are yet to be settled
                self._compiled = compiled.build(self._model, folder, least_rows, progress)
            else:
                self._captured = self._capture(progress)
            self._check_compiled(trials.logits(), logits)
        except (CannotCompile, RuntimeError, OSError) as error:  # also of the code that was made, or for want of a home
            self._do_without(first_line(error))

    def _capture(self, progress: Callable[[str], None]) -> CapturedModel:
        if self._kernel is None:
            raise CannotCompile("its attention gathers KV, and where that lies is not the same for two steps")
        context_tokens = self.info.max_context_tokens
        captured = CapturedModel(self._model, self.cache, self._kernel, self._max_step_tokens, context_tokens)
        return captured.record(self._recorder or CudaRecorder(self._device), progress)

    def _check_compiled(self, got: torch.Tensor, want: torch.Tensor) -> None:
        """Raises: CannotCompile when logits are further from the model's than rounding can bring them."""
        errors = torch.linalg.vector_norm(got - want, dim=1) / torch.linalg.vector_norm(want, dim=1)
        if not float(errors.max()) <= LARGEST_ERROR[self._model.dtype]:
            raise CannotCompile(f"the compiled model's logits are off by {float(errors.max()):.2g} of their norm")

    def _do_without(self, reason: str) -> None:
        """Without compiled code."""
        self._compiled = self._captured = None
        logger.warning("%s does not run compiled, so that every step takes longer: %s", self.info.name, reason)

    # Tiles

    def _settle_tiling(self) -> int | None:
        """Take the fewest rows to a tile with which a row's bits are its own, on this CPU and with this model."""
        tile_rows = self._find_tiles()
        if tile_rows is None and self._compiled is not None:
            self._do_without("its bits depend on how many rows there are")
            tile_rows = self._find_tiles()
        if tile_rows is None:
            logger.warning(
                "a row's bits are NOT its own with %s on this CPU: outputs may differ where two tokens are nearly "
                "equal (so it is with mixtures of experts: how many rows an expert gets depends on the others)",
                self.info.architecture,
            )
        return tile_rows

    def _find_tiles(self) -> int | None:
        fewer: tuple[int, ...] = FEWER_ROWS if packed_weights.is_available(self._model.dtype, self._device) else ()
        for num_rows in (*fewer, CPU_DETERMINISTIC.min_rows):
            self._tile_by(num_rows)
            if self._has_equal_bits():
                logger.info("deterministic steps have rows by %d", num_rows)
                return num_rows
        return None

    def _tile_by(self, num_rows: int) -> None:
        self._tiling = replace(CPU_DETERMINISTIC, min_rows=num_rows, row_multiple=num_rows)

    def _has_equal_bits(self) -> bool:
        """Whether rows have the same bits however many there are to a step, and whatever else is in it."""
        trials = self._trials()
        pairs = zip(trials.together(), trials.apart(), strict=True)
        return torch.equal(trials.at_once(), trials.in_steps()) and all(starmap(torch.equal, pairs))

    def _trials(self) -> Trials:
        max_rows = min(self._max_step_tokens, self.num_free_tokens, self.info.max_context_tokens)
        return Trials(self.forward, self.cache, max_rows, self.info.vocab_size)
