"""A head's directory is read whole, or refused in one line that says what is wrong with it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from core.errors import CheckpointError
from workers.heads import load_head, read_head
from workers.heads.blockwise import WEIGHT

CONFIG = {"model_type": "blockwise", "hidden_size": 4, "vocab_size": 7, "feature_layers": [-1]}


def write(path, weights=None, **changes):
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file({WEIGHT: torch.eye(4)} if weights is None else weights, path / "model.safetensors")
    return str(path)


def load(path):
    return load_head(path, nn.Linear(4, 7), torch.float32, torch.device("cpu"))


def test_it_adds_the_layer_to_the_state_and_asks_the_output_layer(tmp_path):
    torch.manual_seed(1)
    weight, output, states = torch.randn(4, 4), nn.Linear(4, 7), torch.randn(3, 4)
    head = load_head(write(tmp_path, {WEIGHT: weight}), output, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(head(states), output(states + states @ weight.T))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "medusa"}, "model_type is 'medusa'"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"vocab_size": "7"}, "vocab_size must be at least 1, got '7'"),
        ({"feature_layers": [2]}, r"feature_layers is \[2\]"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_named(tmp_path, changes, says):
    with pytest.raises(CheckpointError, match=says):
        read_head(write(tmp_path, **changes))


def test_a_directory_without_a_head_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="describes no head"):
        read_head(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="describes no head"):
        read_head(str(tmp_path))


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({WEIGHT: torch.eye(5)}, r"is \(5, 5\), but config.json says \(4, 4\)"),
        ({WEIGHT: torch.full((4, 4), torch.nan)}, "NaN or infinite"),
        ({"lm_head.weight": torch.eye(4)}, "has lm_head.weight"),
        ({WEIGHT: torch.eye(4), "more": torch.eye(2)}, "more"),
    ],
    ids=["shape", "nan", "another", "left over"],
)
def test_wrong_weights_are_named(tmp_path, weights, says):
    with pytest.raises(CheckpointError, match=says):
        load(write(tmp_path, weights))


def test_damaged_weights_are_refused(tmp_path):
    path = write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="damaged or missing"):
        load(path)


def test_a_head_of_another_target_is_refused(tmp_path):
    head = read_head(write(tmp_path))
    head.check_target(4, 7)
    with pytest.raises(CheckpointError, match="hidden_size is 4, not 8"):
        head.check_target(8, 7)
    with pytest.raises(CheckpointError, match="vocab_size is 7, not 9"):
        head.check_target(4, 9)
