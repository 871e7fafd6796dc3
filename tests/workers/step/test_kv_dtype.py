"""In 8 bits large keys and values stay numbers, and errors stay errors."""

from __future__ import annotations

import pytest
import torch

from core.config import EngineConfig
from core.errors import ConfigError
from workers.model import load
from workers.step.kv_dtype import FP8, as_stored


def test_large_numbers_become_the_largest_and_infinite_ones_stay_an_error() -> None:
    rows = torch.tensor([1.0, -500.0, 1e30, torch.inf, -torch.inf, torch.nan], dtype=torch.bfloat16)
    stored = as_stored(rows, FP8).float()
    assert stored[:3].tolist() == [1.0, -448.0, 448.0]
    assert stored[3:].isnan().all(), "as in bfloat16, the step's scores are no numbers, and its stream ends"


def test_a_gpu_without_such_arithmetic_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(ConfigError, match=r"^kv_dtype: fp8 needs .* 8\.9 or more, and NVIDIA A100 has 8\.0: leave it"):
        load(EngineConfig("/nowhere", device="cuda", kv_dtype="fp8"), lambda _: None)
