"""The benchmark finds whether an architecture is served or refused, and why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from bench.engine import families
from bench.engine.families import DIFFERENT, NOT_BUILT, REFUSED, SERVED, try_family
from bench.engine.two_ranks import ThreadCollectives
from workers.runtime.runtime import ModelRuntime


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_moe"])
def test_what_is_exact_is_served(family: str) -> None:
    finding = try_family(family)
    assert finding.outcome == SERVED
    assert finding.ranks == ("yes" if family == "llama" else "yes, by whole experts")


def test_what_ranks_cannot_share_is_said() -> None:
    assert try_family("gpt2").ranks == "no: gpt2 has no tensor-parallel plan in transformers"


def test_ranks_with_another_sum_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadCollectives, "all_reduce", lambda self, tensor: self._gather(tensor)[0] * 2)
    finding = try_family("llama")
    assert finding.outcome == DIFFERENT
    assert "off by" in finding.ranks


def test_what_cannot_be_rolled_back_is_refused_with_the_reason() -> None:
    finding = try_family("recurrent_gemma")
    assert finding.outcome == REFUSED
    assert "rolled back" in finding.detail


@pytest.mark.parametrize("family", ["gptj", "codegen", "gpt_neo", "deepseek_v3", "llama"])
def test_the_page_says_what_is_found(family: str) -> None:
    """The first three are built with sizes of their own, and refused: none of them is just not tried."""
    finding = try_family(family)
    page = (Path(__file__).parents[3] / "docs" / "families.md").read_text()
    section = page.partition(f"## {finding.outcome.capitalize()}")[2].partition("\n## ")[0]
    served = rf"\de[-+]\d\d \| {re.escape(finding.ranks)}"
    detail = re.escape(finding.detail) if finding.outcome == REFUSED else served
    assert re.search(rf"^\| `{family}` \| {detail} \|$", section, re.MULTILINE)
    assert finding.outcome != NOT_BUILT


def test_a_wrong_logit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ModelRuntime.forward

    def wrong(self: ModelRuntime, batch: object) -> torch.Tensor:
        logits = right(self, batch)  # type: ignore[arg-type]
        return logits + torch.eye(*logits.shape)

    monkeypatch.setattr(ModelRuntime, "forward", wrong)
    assert try_family("llama").outcome == DIFFERENT


def test_what_cannot_be_built_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "MAX_PARAMETERS", 10)
    finding = try_family("llama")
    assert finding.outcome == NOT_BUILT
    assert "parameters" in finding.detail
