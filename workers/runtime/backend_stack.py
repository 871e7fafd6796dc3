"""Chooses a runtime's backends, warms them up and compares them with each other.

Knows the backend interface and the list of backends. Must not know how any of them works.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core.config import EngineConfig
from core.errors import first_line
from workers.model import LoraWeights, decoder_of
from workers.runtime import backends
from workers.runtime.adapters import Adapters
from workers.runtime.backend import Backend, BackendContext, BackendUnavailable
from workers.runtime.self_test import SelfTest, largest_error
from workers.step import Step

logger = logging.getLogger(__name__)

FAILURES = (BackendUnavailable, RuntimeError, OSError)
"""Raised by a backend that cannot be built or run here; torch and the compilers have no error types of their own."""
ALLOWED_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.15}
"""Allowed error of a compiled backend, relative to the norm of a row's logits. In bfloat16 the worst of 50 rows of
SmolLM2-135M is off by 0.13 of its float32 norm in torch's own code, and by 0.075 in a program."""
NOISE_FACTOR = 2.0
"""The allowed error is at least this multiple of the base's own noise: how much its logits differ between batches of
different sizes. Rounding grows with the number of layers, to 0.04 in an 8B model of random weights."""
MAX_ALLOWED_ERROR = 0.25
"""Upper limit of the allowed error, however noisy the base is. Unrelated logits have an error of 1.4."""


def choose(config: EngineConfig, *, runs_own_code: bool = False) -> Sequence[type[Backend]]:
    """Backends that support these settings, fastest first, down to the first that runs every step from the start.

    Only the latter for a model that runs its own code (`runs_own_code`): one with recurrent layers or cross-attention,
    because what they call depends on the sequences of each step.
    """
    suitable = [kind for kind in backends.BACKENDS if kind.supports(config)]
    base = next(index for index, kind in enumerate(suitable) if not kind.is_compiled)
    return suitable[base if runs_own_code else 0 : base + 1]


class BackendStack:
    """The backends of one runtime: the base, which runs every step, and what the warm-up has built above it."""

    def __init__(self, kinds: Sequence[type[Backend]], context: BackendContext, all_min: Callable[[int], int]) -> None:
        """`all_min` returns the smallest of the numbers that the model's ranks pass to it."""
        *compiled, base = kinds
        self._context = context
        self._all_min = all_min
        self._base = base(context)
        self._to_build = [kind for kind in compiled if all_min(int(kind.is_worth_building(context.model)))]
        self._built: list[Backend] = []
        self._adapters = Adapters(context.model, context.config)
        self.num_base_steps = 0
        """Number of steps that the base has run."""

    @property
    def is_compiled(self) -> bool:
        """Whether a backend runs steps whose logits may differ from the base's."""
        return not all(backend.is_bit_exact for backend in self._built)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the backends that logits may depend on, in the order in which they are tried."""
        changing = (backend for backend in self._built if not backend.is_bit_exact)
        return tuple(type(backend).__name__ for backend in (*changing, self._base))

    def run(self, step: Step) -> Tensor:
        """Run a step on the first backend that runs such a step, as `Backend.run`.  # [rows or more, vocab]

        Steps with adapters go to the base: what was compiled or recorded has no place for them.
        """
        if step.has_adapters:
            with self._adapters.applied(step):
                return self._run_base(step)
        for backend in self._built:
            logits = backend.run(step)
            if logits is not None:
                return logits
        return self._run_base(step)

    def _run_base(self, step: Step) -> Tensor:
        self.num_base_steps += 1
        logits = self._base.run(step)
        assert logits is not None, "the base runs every step"
        return logits

    def warm_up_base(self, progress: Callable[[str], None]) -> None:
        """Warm up the base, which each rank does on its own."""
        self._base.warm_up(progress)

    def build_all(self, self_test: SelfTest, name: str, progress: Callable[[str], None]) -> None:
        """Build each compiled backend and compare its logits. One that fails is left out, and the log says why."""
        if not self._to_build and self._context.config.compile:
            config, is_recurrent = self._context.config, self._context.cache.states.is_used
            what = "recurrent layers" if is_recurrent else f"{config.num_ranks} rank(s)"
            what = "an encoder-decoder" if decoder_of(self._context.model) is not None else what
            self._warn(name, f"no compiled backend suits {what} on {config.device}")
        while self._to_build:
            kind = self._to_build[-1]
            test = self_test.brief() if kind.is_bit_exact or not kind.has_shapes else self_test
            want, noise = test.logits(), 0.0 if kind.is_bit_exact else test.noise()
            try:
                self.build(progress)
            except BackendUnavailable as error:
                self._explain(name, kind, str(error))
                continue
            reason = self._failure(test, want, noise)
            if reason is not None:
                self.drop(name, reason)

    def build(self, progress: Callable[[str], None]) -> None:
        """Build the next backend and use it from now on, on all ranks or none. Raises: BackendUnavailable."""
        kind, reason = self._to_build.pop(), ""
        try:
            backend = kind(self._context, self._built[0] if self._built else self._base)
            backend.warm_up(progress)
        except FAILURES as error:
            reason = first_line(error)
        if not self._all_min(int(not reason)):
            raise BackendUnavailable(reason or "another rank cannot build it")
        self._built.insert(0, backend)

    def drop(self, name: str, reason: str) -> None:
        """Remove the backend that was built last."""
        self._explain(name, type(self._built.pop(0)), reason)

    def build_more(self, *, is_idle: bool) -> bool:
        """Build one part of the fastest backend that the start left out, if one is due; returns whether it was.

        Call between steps. `is_idle`: no step waits.
        """
        part = self._built[0].due(is_idle=is_idle) if self._built else None
        if part is not None:
            self.build_part(part)
        return part is not None

    def build_part(self, part: int) -> None:
        """Build this part of the fastest backend and use it from now on, on all ranks or none."""
        reason = "another rank cannot build it"
        use: Callable[[], None] | None = None
        try:
            use = self._built[0].build_part(part)
        except BackendUnavailable as error:
            reason = str(error)
        if self._all_min(int(use is not None)) and use is not None:
            use()
        else:
            logger.warning("part %d of %s is left out: %s", part, type(self._built[0]).__name__, reason)

    def add_adapter(self, number: int, weights: LoraWeights) -> None:
        """Compute rows with this number with these weights, on all ranks. Raises: CheckpointError if a rank cannot."""
        self._adapters.add(number, weights)

    def drop_adapter(self, number: int) -> None:
        self._adapters.drop(number)

    def uncalled(self, number: int) -> list[str]:
        """See `Adapters.uncalled`."""
        return self._adapters.uncalled(number)

    def close(self) -> None:
        """Stop the other ranks; a single process has none."""

    def _failure(self, self_test: SelfTest, want: Tensor, noise: float) -> str | None:
        """Why the backend built last cannot be used; None if its logits are right (up to rounding, if it may round)."""
        try:
            got = self_test.logits()
        except FAILURES as error:
            return first_line(error)
        if self._built[0].is_bit_exact:
            return None if torch.equal(got, want) else "what was recorded gives other logits than the model's code"
        off_by = largest_error(got, want)
        if off_by <= max(ALLOWED_ERROR[self._context.model.dtype], min(NOISE_FACTOR * noise, MAX_ALLOWED_ERROR)):
            return None
        return f"the compiled model's logits are off by {off_by:.2g} of their norm"

    @classmethod
    def _explain(cls, name: str, kind: type[Backend], reason: str) -> None:
        """Log why a backend is not used; as a warning if the settings ask for it."""
        if kind.is_bit_exact:
            logger.info("%s is run by its own code: %s", name, reason)
        else:
            cls._warn(name, reason)

    @staticmethod
    def _warn(name: str, reason: str) -> None:
        logger.warning("%s does not run compiled, so that every step takes longer: %s", name, reason)
