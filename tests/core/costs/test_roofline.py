"""Memory and time by the data sheet: against what was measured, and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.costs import GPUS, KVShape, ModelShape, Placed
from core.costs.roofline import GB, KV_SHARE

LLAMA_8B = ModelShape(8_030_261_248, 0, 1.0, 4096, 128_256, (KVShape(8, 128, 128),) * 32, 2)
"""The shape whose steps were measured on an H200 (docs/adr/gpu-runtime.md)."""
EXPERTS = ModelShape(1000, 800, 0.25, 8, 16, (KVShape(2, 4, 4),), 2)


@pytest.mark.parametrize(
    ("rows", "context", "measured_ms"),
    [(1, 1000, 4.60), (1, 8000, 5.07), (8, 1000, 5.01), (32, 1000, 5.77), (2048, 0, 46.7)],
)
def test_steps_of_an_8b_on_an_h200_are_near_the_measured_ones(rows: int, context: int, measured_ms: float) -> None:
    assert Placed(LLAMA_8B, GPUS["h200"]).step_s(rows, context) * 1e3 == pytest.approx(measured_ms, rel=0.12)


def test_a_row_reads_its_own_experts_and_many_rows_all() -> None:
    assert EXPERTS.num_active == 400
    assert EXPERTS.read_bytes(1) == 2 * 400
    assert EXPERTS.read_bytes(2) == pytest.approx(2 * (1000 - 800 * 0.75**2))
    assert EXPERTS.read_bytes(10_000) == pytest.approx(2 * 1000)


def test_ranks_beyond_the_number_of_heads_hold_copies() -> None:
    assert [LLAMA_8B.kv_bytes(ranks) for ranks in (1, 2, 8, 16)] == [131_072, 65_536, 16_384, 16_384]


def test_weights_a_step_and_kv_share_nine_tenths_of_the_memory() -> None:
    placed = Placed(LLAMA_8B, GPUS["h200"], 2)
    taken = LLAMA_8B.weight_bytes / 2 + LLAMA_8B.step_bytes(64) + placed.kv_tokens(64) * LLAMA_8B.kv_bytes(2)
    assert taken == pytest.approx(0.9 * 141e9, abs=LLAMA_8B.kv_bytes(2))
    assert Placed(LLAMA_8B, GPUS["l4"]).kv_tokens(64) > 0
    assert Placed(ModelShape(10**11, 0, 1.0, 1, 1, (KVShape(1, 1, 1),), 2), GPUS["l4"]).kv_tokens(64) < 0


def test_the_law_has_the_steps_durations() -> None:
    placed = Placed(LLAMA_8B, GPUS["h100"], 4)
    assert placed.law(500)(32) == placed.step_s(32, 500)
    assert placed.dollars == 4 * GPUS["h100"].dollars


def test_states_take_half_of_what_weights_leave_or_all_of_it_without_attention() -> None:
    hybrid = Placed(ModelShape(10**9, 0, 1.0, 1, 1, (KVShape(1, 50, 50),), 2, state_bytes=10**6), GPUS["l4"])
    room = 24 * GB * KV_SHARE - 2 * 10**9 - hybrid.model.step_bytes(64)
    assert hybrid.kv_tokens(64) == room / 2 // 200
    assert hybrid.num_states(64) == room / 2 // 10**6
    pure = Placed(replace(hybrid.model, layers=(KVShape(0, 0, 0),)), GPUS["l4"])
    assert pure.num_states(64) == room // 10**6
    assert pure.kv_tokens(64) > 10**9
    assert Placed(replace(hybrid.model, state_bytes=0), GPUS["l4"]).num_states(64) == 0
