"""The survey finds by a checkpoint's tokens that it is served, why it is refused, and what it needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from bench.checkpoints import tried
from bench.checkpoints.published import FOLDER, Published, read
from bench.checkpoints.section import with_section
from bench.checkpoints.stored import quantized
from bench.checkpoints.tried import DIFFERENT, REFUSED, SERVED, Tried, try_checkpoint
from workers.runtime.runtime import ModelRuntime

BY_NAME = {published.name: published for published in read()}


def one(name: str) -> Published:
    return BY_NAME[name]


def test_there_are_thirty() -> None:
    assert len(BY_NAME) == len(list(FOLDER.glob("*.json"))) == 30


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_a_small_configuration_keeps_what_decides_how_a_model_computes(name: str) -> None:
    whole, small = ({**each, **each.get("text_config", {})} for each in (one(name).config, one(name).small_config))
    for kept in (
        "head_dim",
        "qk_rope_head_dim",
        "rope_scaling",
        "rope_parameters",
        "rope_theta",
        "quantization_config",
    ):
        assert small.get(kept) == whole.get(kept)
    ratio = whole["num_attention_heads"] // whole["num_key_value_heads"]
    assert small["num_attention_heads"] == ratio * small["num_key_value_heads"]
    assert (whole.get("sliding_window") is None) == (small.get("sliding_window") is None)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "google/gemma-4-E2B-it"])
def test_what_writes_the_same_tokens_is_served_where_it_fits(name: str) -> None:
    row = try_checkpoint(one(name))
    assert row.outcome == SERVED
    assert row.detail.startswith("bfloat16, 1 x L4, up to ")


def test_a_wrong_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ModelRuntime.forward

    def wrong(self: ModelRuntime, batch: object) -> torch.Tensor:
        return -right(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRuntime, "forward", wrong)
    row = try_checkpoint(one("Qwen/Qwen3-0.6B"))
    assert (row.outcome, row.detail) == (DIFFERENT, "token 1 of 24 differs")


def test_what_fits_nowhere_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tried, "PLACES", (("l4", 1),))
    row = try_checkpoint(one("Qwen/Qwen3-8B"))
    assert row.outcome == REFUSED
    assert row.detail == "its weights take 16 GB in bfloat16, more than 1 L4 hold beside a step and KV"


def test_weights_in_fp8_are_compared_with_those_that_are_meant() -> None:
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {**one("Qwen/Qwen3-0.6B").config, "quantization_config": blocks}
    assert try_checkpoint(Published("a/b", config, {})).outcome == SERVED


def test_the_reason_of_a_refusal_names_no_folder_of_the_run() -> None:
    blocks = {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}
    row = try_checkpoint(Published("a/b", {**one("Qwen/Qwen3-0.6B").config, "quantization_config": blocks}, {}))
    assert row.outcome == REFUSED
    assert row.detail.startswith("config.json has a quantization_config")


def test_mxfp4_is_stored_as_transformers_reads_it() -> None:
    weight = torch.randn(2, 64, 32)
    stored, meant = quantized({"model.layers.0.mlp.experts.down_proj": weight}, {"quant_method": "mxfp4"})
    blocks, scales = (stored[f"model.layers.0.mlp.experts.down_proj_{end}"] for end in ("blocks", "scales"))
    read_back = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(read_back, meant["model.layers.0.mlp.experts.down_proj"])
    assert (read_back - weight).abs().max() < 1.0


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "compressed-tensors"])
def test_what_is_meant_is_close_to_what_was_quantized(method: str) -> None:
    weight = torch.randn(256, 256)
    _, meant = quantized({"model.layers.0.mlp.up_proj.weight": weight}, {"quant_method": method})
    error = (meant["model.layers.0.mlp.up_proj.weight"] - weight).abs().max()
    assert error < 0.9


def test_a_served_checkpoint_keeps_its_day_and_a_refused_one_does_not() -> None:
    served, refused = Tried("a/b", "8B", "bfloat16", SERVED, "1 x L4"), Tried("c/d", "9B", "awq", REFUSED, "awq")
    first = with_section("# Families\n\nOf architectures.\n", [served, refused], "")
    day = first.rpartition("| awq |")[2].strip(" |\n").partition(" ")[0]
    old = first.replace(day, "2026-01-02")
    again = with_section(old, [served, refused], old)
    assert "| a/b | 8B | bfloat16 | served | 1 x L4 | 2026-01-02 |" in again
    assert "| c/d | 9B | awq | refused | awq | 2026-01-02 |" not in again
    assert again.count("## Checkpoints: 1 of 2 served") == again.count("Of architectures.") == 1


def test_the_page_has_a_row_for_each() -> None:
    text = (Path(__file__).parents[3] / "docs" / "families.md").read_text()
    assert all(f"| {name} | " in text for name in BY_NAME)
