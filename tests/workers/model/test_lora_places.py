"""Adapters are refused by name on layers that do not run over the rows of a step."""

from __future__ import annotations

import pytest

from core.errors import UnsupportedModel
from core.records import Adapter
from tests import checkpoints
from tests.adapters import write_adapter
from workers.model import load, read_adapter


@pytest.mark.parametrize(
    ("family", "target", "says"),
    [
        ("qwen3_next", "out_proj", "recurrent mixer"),
        ("bamba", "in_proj", "recurrent mixer"),
        ("deepseek_v3", "kv_b_proj", "kept as latents"),
    ],
)
def test_layers_that_run_elsewhere(tmp_path, family, target, says):
    path = checkpoints.write(family, tmp_path / "model")
    adapter = Adapter("a", str(write_adapter(tmp_path / "adapter", path, targets=(target,))), "")
    loaded = load(checkpoints.EngineConfig(str(path)), lambda _: None).model
    for model in (checkpoints.build(family), loaded):  # as transformers has it, and as it runs
        with pytest.raises(UnsupportedModel, match=says):
            read_adapter(adapter, model, None)
