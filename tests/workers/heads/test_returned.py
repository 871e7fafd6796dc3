"""The output layer of a model over ranks is read whole, for the head on the first of them."""

from __future__ import annotations

from core.config import EngineConfig
from tests import checkpoints
from workers.heads.returned import _borrowed


def test_a_model_of_whole_experts_on_each_rank_has_one_too(tmp_path):
    path = checkpoints.write("mixtral", tmp_path)
    config = EngineConfig(str(path), tensor_parallel=2, expert_parallel=True)
    _, layer = _borrowed(config, None, lambda _: None)
    assert layer.weight.shape == (checkpoints.SIZES["vocab_size"], checkpoints.SIZES["hidden_size"])
