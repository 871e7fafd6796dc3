"""A step goes to the fastest backend that runs it; one that cannot be built, or is wrong, is left out with a reason."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.config import EngineConfig
from workers.runtime import backends
from workers.runtime.backend import Backend
from workers.runtime.backend_stack import BackendStack, choose
from workers.runtime.backends import (
    CompiledBackend,
    CudaGraphBackend,
    EagerBackend,
    PackedBackend,
    ProgramBackend,
    TracedBackend,
)
from workers.runtime.backends.compiled_layers import CompiledLayersBackend
from workers.step import Step
from workers.step.states import StateSlots

STEP = Step([0, 0], [0, 1], [1], [])
SMALL = Step([0], [0], [0], [])


class Base(Backend):
    """Runs every step, to 1."""

    is_compiled = False

    @classmethod
    def supports(cls, config: EngineConfig) -> bool:
        return True

    def run(self, step: Any) -> torch.Tensor | None:
        return torch.full((1, 2), 1.0)


class Fast(Base):
    """Runs small steps alone, to 2."""

    is_compiled = True

    def run(self, step: Any) -> torch.Tensor | None:
        return torch.full((1, 2), 2.0) if step == SMALL else None


class Recorded(Fast):
    """Claims to have the bits of the one below."""

    is_bit_exact = True


class Unbuildable(Fast):
    def __init__(self, context: Any, below: Any = None) -> None:
        raise RuntimeError("out of memory\nand more")


def stack_of(*kinds: type[Backend]) -> BackendStack:
    context: Any = SimpleNamespace(
        config=EngineConfig("m", compile=True),
        model=SimpleNamespace(dtype=torch.float32),
        cache=SimpleNamespace(states=StateSlots()),
    )
    return BackendStack(kinds, context, int)


def build(stack: BackendStack, step: Any = STEP, noise: float = 0.0) -> None:
    """With a self-test of this step; `noise` is that of the base."""
    self_test: Any = SimpleNamespace(logits=lambda: stack.run(step), brief=lambda: self_test, noise=lambda: noise)
    stack.build_all(self_test, "model", lambda _: None)


def test_a_step_goes_to_the_fastest_that_runs_it_and_others_are_counted() -> None:
    stack = stack_of(Fast, Base)
    build(stack)
    stack.num_base_steps = 0
    assert (stack.run(SMALL)[0, 0], stack.run(STEP)[0, 0]) == (2.0, 1.0)
    assert stack.is_compiled
    assert stack.num_base_steps == 1


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Unbuildable, "out of memory"), (Fast, "the compiled model's logits are off by 1 of their norm")],
)
def test_a_backend_that_fails_is_left_out_and_the_one_below_is_not(
    kind: type[Backend], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Right(Fast):
        def run(self, step: Any) -> torch.Tensor | None:
            return Base.run(self, step)

    stack = stack_of(kind, Right, Base)
    with caplog.at_level(logging.WARNING):
        build(stack, SMALL)
    assert [record.getMessage() for record in caplog.records] == [
        f"model does not run compiled, so that every step takes longer: {reason}"
    ]
    assert [type(backend) for backend in stack._built] == [Right]


@pytest.mark.parametrize(
    ("noise", "logit", "is_used"),
    [(0.0, 1.01, False), (0.01, 1.01, True), (0.01, 1.1, False), (9.0, 1.5, False), (torch.nan, 1.01, False)],
)
def test_noise_of_the_base_excuses_as_much_again_but_not_everything(
    *, noise: float, logit: float, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fast, "run", lambda *_: torch.full((1, 2), logit))
    stack = stack_of(Fast, Base)
    build(stack, noise=noise)
    assert bool(stack._built) == is_used


@pytest.mark.parametrize(("logit", "is_used"), [(1.0, True), (1.0 + 2**-20, False)])
def test_what_claims_to_keep_bits_is_held_to_it_and_is_nobodys_wish(
    *, logit: float, is_used: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorded, "run", lambda *_: torch.full((1, 2), logit))
    stack = stack_of(Recorded, Base)
    with caplog.at_level(logging.WARNING):
        build(stack)
    assert bool(stack._built) == is_used
    assert not caplog.records
    assert (stack.names, stack.is_compiled) == (("Base",), False), "nothing but time depends on it"


def test_what_is_not_worth_it_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fast, "is_worth_building", lambda _: False)
    stack = stack_of(Fast, Base)
    build(stack)
    assert not stack._built


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({}, [ProgramBackend, TracedBackend, PackedBackend]),
        ({"compile": True}, [ProgramBackend, CompiledBackend, PackedBackend]),
        ({"compile": True, "tensor_parallel": 2}, [ProgramBackend, PackedBackend]),
        ({"tensor_parallel": 2}, [ProgramBackend, PackedBackend]),
        ({"device": "cuda"}, [EagerBackend]),
        ({"device": "cuda", "compile": True}, [CudaGraphBackend, CompiledLayersBackend, EagerBackend]),
        (
            {"device": "cuda", "compile": True, "tensor_parallel": 2},
            [CudaGraphBackend, CompiledLayersBackend, EagerBackend],
        ),
        ({"device": "cuda", "compile": True, "pipeline_parallel": 2}, [CudaGraphBackend, EagerBackend]),
    ],
)
def test_settings_choose_backends(settings: dict[str, Any], want: list[type[Backend]]) -> None:
    assert choose(EngineConfig("m", **settings)) == want
    assert backends.BACKENDS[-1] is EagerBackend, "it runs everywhere"
