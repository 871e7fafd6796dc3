"""Mixers are found by what their code does, and described by a run of their own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import UnsupportedModel
from tests import checkpoints
from workers.recurrent import describe, find_mixers
from workers.recurrent.mixers import Mixer


def described(family: str, **settings: Any) -> tuple[Mixer, ...]:
    return describe(checkpoints.build(family, **settings))


def test_a_gated_delta_net_has_two_states_and_its_projections_are_found() -> None:
    first, second = described("qwen3_next")
    assert (first.layer, second.layer) == (0, 2)
    assert [(each.name, each.shape) for each in first.states] == [(("conv", 0), (64, 4)), (("recurrent", 0), (4, 8, 8))]
    assert (first.inputs, first.output) == (("in_proj_qkvz", "in_proj_ba"), "out_proj")
    assert first.takes_chunks


def test_a_short_convolution_has_one_state() -> None:
    first, _ = described("lfm2")
    assert [(each.name, each.shape) for each in first.states] == [(("conv", 0), (32, 3))]
    assert (first.inputs, first.output) == (("in_proj",), "out_proj")


def test_chunks_are_not_taken_by_code_that_begins_them_without_a_state() -> None:
    """transformers' Mamba computes several tokens from an empty state, whatever its cache holds."""
    assert not any(mixer.takes_chunks for mixer in described("jamba"))
    assert all(mixer.takes_chunks for mixer in described("bamba"))


def test_attention_is_no_mixer() -> None:
    assert find_mixers(checkpoints.build("llama")) == []


def test_a_weight_that_a_mixer_reads_itself_stays_in_place(tmp_path: Path) -> None:
    """Packed weights are replaced by NaN, which the products of Mamba's time steps would read."""
    runtime = checkpoints.runtime(checkpoints.write("mamba", tmp_path), deterministic=True)
    weights = {name: weight for name, weight in runtime.context.model.named_parameters() if "proj" in name}
    is_whole = {name: bool(weight.isfinite().all()) for name, weight in weights.items()}
    assert all(whole for name, whole in is_whole.items() if "dt_proj" in name)


def test_limits_of_time_steps_hold_for_single_tokens_too() -> None:
    """transformers applies them to a prompt only: without ours, the two would differ and the model be refused."""
    model = checkpoints.build("nemotron_h", time_step_min=0.5)
    assert [mixer.layer for mixer in describe(model)] == [0, 2]
    for _, module in find_mixers(model):
        module.in_proj._forward_hooks.clear()
        module.time_step_limit = (0.0, float("inf"))
    whole = checkpoints.build("nemotron_h", time_step_min=0.5)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert not torch.allclose(model(ids).logits, whole(ids).logits, atol=1e-3), "the limit matters here"


def test_a_mixer_that_computes_prompts_differently_from_single_tokens_is_refused() -> None:
    model = checkpoints.build("bamba")
    (_, module), *_ = find_mixers(model)
    forward = module.forward
    module.forward = lambda rows, cache_params: forward(rows, cache_params=cache_params) * (1 + rows.shape[1] / 50)
    with pytest.raises(UnsupportedModel, match="layer 0 of bamba computes the tokens of a prompt differently"):
        describe(model)


def test_a_mixer_that_cannot_be_run_by_itself_is_refused() -> None:
    with pytest.raises(
        UnsupportedModel, match="layer 0 of zaya keeps a state, but its ZayaCCAProjection cannot be run"
    ):
        described("zaya", num_experts=4, num_experts_per_tok=1, head_dim=16, moe_intermediate_size=16)
