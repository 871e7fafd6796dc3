"""Runs forward passes: prefill chunks, plain steps, chains and trees of guesses, of many sequences in one pass.

Knows the model and its KV. Must not know how a pass is run (`workers.runtime.backend` does), sampling, sessions or
which guesses are right: it returns logits, and the caller rolls back by `cache.truncate` or `cache.compact`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import ClassVar

import torch

from core.config import EngineConfig
from core.errors import CheckpointError, ConfigError, UnsupportedModel
from core.records import Adapter, Findings
from workers.attention import Kernel, find_kernel
from workers.heads import tapped_layers
from workers.model import LoadedModel, LoraWeights, decoder_of, is_mixture, read_adapter
from workers.recurrent import States
from workers.runtime.backend import BackendContext
from workers.runtime.backend_stack import BackendStack, choose
from workers.runtime.features import FeatureTap
from workers.runtime.memory import bytes_beside_kv, num_kv_blocks, num_states, token_bytes
from workers.runtime.self_test import SelfTest
from workers.runtime.sources import Sources
from workers.runtime.tiling import choose_tiling, find_tile_rows, tiles_of
from workers.sampling import DraftVocabulary
from workers.step import KVCache, LayerShape, Step, StepRows, flatten
from workers.step.kv_dtype import kv_dtype

logger = logging.getLogger(__name__)

SLOW_ROWS = 64
"""A pass with more rows is timed once: compared with it, the cost of a kernel's first use is small."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Results of a pass for its wanted rows, in float32."""

    logits: torch.Tensor
    """[rows, vocab]."""
    features: torch.Tensor | None = None
    """Hidden states of `tapped_layers`, side by side; None without such layers.  # [rows, width]"""
    tokens: DraftVocabulary | None = None
    """The tokens of the columns of `logits`; None if they are all token ids in order."""

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """The rows of all parts, in order."""
        features = [part.features for part in parts if part.features is not None]
        return cls(torch.cat([part.logits for part in parts]), torch.cat(features) if features else None)

    def take(self, rows: Sequence[int]) -> Scores:
        """The scores of these rows."""
        index = torch.tensor(rows, dtype=torch.long, device=self.logits.device)
        return Scores(self.logits[index], None if self.features is None else self.features[index])


class ModelRuntime:
    """A loaded model and the KV of its sequences."""

    max_depth: ClassVar[int] = sys.maxsize
    """Depth of the deepest guess that it can make below the text."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        cache_type: type[KVCache] = KVCache,
        kernel: Kernel | None = None,
        stack_type: Callable[..., BackendStack] = BackendStack,
        all_min: Callable[[int], int] = int,
        beside: Sequence[LayerShape] = (),
    ) -> None:
        """`kernel`: attention kernel; None for the device's own. `all_min` returns the smallest of the numbers that the
        model's ranks pass to it. `beside`: what else is stored for each token in the same memory. Raises: StartupError
        without memory for KV."""
        decoder = decoder_of(loaded.model)
        runs_own_code = bool(loaded.mixers) or decoder is not None
        tiling, kinds = choose_tiling(config), choose(config, runs_own_code=runs_own_code)
        if loaded.mixers and config.quantize is not None:
            raise UnsupportedModel(f"quantize must be absent: {loaded.info.architecture} has recurrent layers")
        tapped = tapped_layers(config)
        if tapped:
            FeatureTap(loaded.model, tapped)
        for kind in kinds:
            kind.prepare_weights(loaded.model, config, loaded.shard)
        taken = partial(bytes_beside_kv, loaded.model, config)
        of_state = sum(part.num_bytes for mixer in loaded.mixers for part in mixer.states)
        stored = kv_dtype(config, loaded.model.dtype)
        of_others = token_bytes(beside, loaded.model.dtype)
        num_local = 1 if loaded.shard is None else loaded.shard.num_local
        num_blocks = num_kv_blocks(config, loaded.layers, stored, all_min, taken, of_state, of_others, num_local)
        self.info = replace(
            loaded.info,
            kv_cache_tokens=num_blocks * config.block_tokens,
            feature_layers=config.feature_layers,
            feature_width=len(config.feature_layers) * loaded.model.config.hidden_size,
        )
        logger.info("KV of %d tokens", self.info.kv_cache_tokens)
        device = torch.device(config.device)
        kv_bytes = num_blocks * config.block_tokens * token_bytes(loaded.layers, stored)
        states = num_states(config, of_state, kv_bytes, all_min, taken, num_local)
        self.cache = cache_type(loaded.layers, num_blocks, config.block_tokens, stored, device, states)
        if loaded.mixers:
            self.info = replace(self.info, num_states=states)
        self._states = States(loaded.model, loaded.mixers, states, is_deterministic=config.deterministic)
        self._sources = Sources(decoder, self.cache) if decoder is not None else None
        if decoder is None:  # the kernel has no place for cross-attention
            kernel = kernel or find_kernel(self.cache, is_deterministic=config.deterministic)
        self.context = BackendContext(
            loaded.model, self.cache, kernel, config, self.info.max_context_tokens, tiling, loaded.shard
        )
        self.backends = stack_type(kinds, self.context, all_min)
        self._tapped_width = len(tapped) * loaded.model.config.hidden_size
        self._features: torch.Tensor | None = None
        """Features of the last pass: the hidden states of all tapped layers."""
        self.read_adapter: Callable[[Adapter], LoraWeights] = partial(
            read_adapter, model=loaded.model, shard=loaded.shard, rename=loaded.rename
        )
        """Read this rank's part of an adapter. May run on another thread than steps do."""
        self.all_min = all_min
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
        return f"{hardware}; torch {torch.__version__}; {backends}; {config.num_ranks} ranks{threads}{weights}"

    def scores(self, batch: Sequence[StepRows]) -> Scores:
        """Logits like `forward`'s, with the features of the same rows."""
        return Scores(self.forward(batch), self._features)

    @torch.inference_mode()
    def forward(self, batch: Sequence[StepRows]) -> torch.Tensor:
        """Append all rows to their sequences' KV. Returns float32 logits of the wanted rows.  # [rows, vocab]

        Logits are in batch order. By default each sequence has those of its last token and its new nodes.
        Raises: OutOfBlocks, before anything is changed.
        """
        self._check(batch)
        if self._must_part(batch):
            return self._forward_in_parts(batch)
        self._reserve(batch)
        if self._sources is not None:
            batch = self._sources.write(batch)
            if not batch:
                return torch.empty(0, self.info.vocab_size, device=self.cache.device)
        step = flatten(batch)
        self._states.begin_step(self.cache.states.plan(step.spans, self._states.max_stepped))
        assert min(step.ids) >= 0, f"token id {min(step.ids)}"
        assert max(step.ids) < self._num_embeddings, f"token id {max(step.ids)} of {self._num_embeddings}"
        rows = self.run(self._padded(step))
        for span in step.spans:
            self.cache.extend(span.kv, span.num_rows)
        self.cache.states.end_step(step.spans)
        width = self._tapped_width
        self._features = rows[: len(step.wanted), -width:] if width else None
        return _cut(rows, len(step.wanted), self.info.vocab_size)

    def _must_part(self, batch: Sequence[StepRows]) -> bool:
        """Whether rows without an adapter have to be computed apart from rows with one, which are never compiled, so
        that their bits stay those of the compiled model."""
        is_mixed = len({bool(item.adapter) for item in batch}) > 1
        return is_mixed and self.context.config.deterministic and self.backends.is_compiled

    def _forward_in_parts(self, batch: Sequence[StepRows]) -> torch.Tensor:
        self._reserve(batch)
        parts = [self.scores([item for item in batch if bool(item.adapter) == has]) for has in (False, True)]
        taken = [0, len(parts[0].logits)]  # rows of the second part follow those of the first
        rows = list[int]()
        for item in batch:
            first = taken[bool(item.adapter)]
            rows += range(first, first + item.num_wanted)
            taken[bool(item.adapter)] += item.num_wanted
        scores = Scores.joined(parts).take(rows)
        self._features = scores.features
        return scores.logits

    def _reserve(self, batch: Sequence[StepRows]) -> None:
        """Raises: OutOfBlocks, before anything is changed."""
        self.cache.states.reserve_all((item.kv, item.num_states) for item in batch)
        self.cache.reserve_all((item.kv, item.kv.num_tokens + item.num_rows) for item in batch)

    def run(self, step: Step) -> torch.Tensor:
        """Write the step's KV. Returns float32 logits of its wanted rows, each followed by padding and its features.

        # [rows, at least vocab + features]
        """
        assert max(step.positions) < self.info.max_context_tokens, "a position beyond the model's context"
        rows = self.backends.run(step)
        if not self._tapped_width:
            rows = _cut(rows, len(step.wanted), self.info.vocab_size)
        return rows.float()

    def add_adapter(self, number: int, weights: LoraWeights) -> None:
        """Compute rows of this number with these weights.

        Raises: CheckpointError if another rank cannot read them; UnsupportedModel for modules that are not called.
        """
        self.backends.add_adapter(number, weights)
        if not self._max_rows():  # KV is full, so it cannot be tried
            return

        def forward(batch: Sequence[StepRows]) -> torch.Tensor:
            return self.forward([replace(item, adapter=number) for item in batch])

        try:
            self._try_adapter(number, weights.adapter.name, replace(self._self_test().brief(), forward=forward))
        except BaseException:
            self.drop_adapter(number)
            raise

    def _try_adapter(self, number: int, name: str, test: SelfTest) -> None:
        """Raises: UnsupportedModel."""
        test.in_one_step()
        if uncalled := self.backends.uncalled(number):
            raise UnsupportedModel(f"adapter {name!r}: the model does not call {uncalled[0]}, so nothing can be added")
        if self.context.config.deterministic and not test.is_batch_invariant():
            logger.warning("deterministic is NOT met with adapter %s: a row's bits depend on the other rows", name)

    def drop_adapter(self, number: int) -> None:
        self.backends.drop_adapter(number)

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

    def build_more(self, *, is_idle: bool) -> bool:
        """See `BackendStack.build_more`."""
        return self.backends.build_more(is_idle=is_idle)

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
        """Use the smallest tile in which a row's bits do not depend on other rows. Returns its rows, or None.

        Raises: ConfigError if there is none for a mixture of experts.
        """
        tile_rows = find_tile_rows(self.context, self._self_test())
        while tile_rows is None and self.backends.is_compiled:
            self.backends.drop(self.info.name, "its bits depend on the number of rows")
            tile_rows = find_tile_rows(self.context, self._self_test())
        device = self.cache.device.type.upper()
        if tile_rows is None and is_mixture(self.context.model):
            raise ConfigError(
                f"deterministic cannot be had with {self.info.architecture}, a mixture of experts, on this {device}: a "
                "row's bits depend on the other rows; set it to false"
            )
        if tile_rows is None:
            logger.warning(
                "deterministic is NOT met with %s on this %s: a row's bits depend on the other rows, and outputs may "
                "differ where two tokens are nearly equal",
                self.info.architecture,
                device,
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
        max_rows = min(self._max_rows(), self.cache.states.max_guesses())  # it has guesses in place of tokens
        return SelfTest(self.forward, self.cache, max_rows, self.info.vocab_size)

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
