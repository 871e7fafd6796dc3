"""Tokens that change with the company of a row are found, and explained by how near they were to each other."""

from __future__ import annotations

import argparse

import pytest
import torch

from bench.engine import divergence
from deploy.settings import DEMO_DIRECTORY
from workers.runtime.runtime import ModelRuntime
from workers.step.rows import Step


def measured(**settings: object) -> dict[str, float]:
    parser = argparse.ArgumentParser()
    divergence.add_arguments(parser)
    args = parser.parse_args(["--dtype", "float32", "--prompts", "3", "--tokens", "12"])
    args.model = DEMO_DIRECTORY / "draft"
    for name, value in settings.items():
        setattr(args, name, value)
    return {result.name: result.value for result in divergence.measure(args)}


@pytest.mark.ci
def test_deterministic_steps_change_no_token() -> None:
    assert set(measured(deterministic=True).values()) == {0}


def test_a_row_that_depends_on_its_company_is_found_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here rows of larger steps prefer one token to all others by so much that it wins wherever it was near."""
    right = ModelRuntime.run

    def biased(self: ModelRuntime, step: Step) -> torch.Tensor:
        logits = right(self, step)
        logits[:, 17] += 6.0 * (len(step.ids) > 1)
        return logits

    monkeypatch.setattr(ModelRuntime, "run", biased)
    found = measured()
    for title in ("T = 0", "T = 0.8"):
        assert found[f"{title}: completions unlike plain decoding"] > 0
        assert (
            0 < found[f"{title}: gap over drift, largest"] <= 2.0
        )  # one of the two may rise as far as the other falls
