"""A directory of heads is read whole, or refused in one line that says what is wrong with it."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from core.errors import CheckpointError
from workers.heads import load_head, read_head

HIDDEN, VOCAB = 4, 7
CONFIG = {"model_type": "blockwise", "hidden_size": HIDDEN, "vocab_size": VOCAB, "feature_layers": [-1]}
WEIGHT = "heads.0.weight"


def write(path, weights=None, **changes):
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file({WEIGHT: torch.eye(HIDDEN)} if weights is None else weights, path / "model.safetensors")
    return str(path)


def load(path, output=None):
    return load_head(path, output or nn.Linear(HIDDEN, VOCAB), torch.float32, torch.device("cpu"))


def medusa_tensors(num_heads=2, num_layers=1):
    torch.manual_seed(1)
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(HIDDEN, HIDDEN)
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(HIDDEN)
        tensors[f"{head}.{num_layers}.weight"] = torch.randn(VOCAB, HIDDEN)
    return tensors


def write_medusa(path, tensors, num_heads=2, num_layers=1, file="medusa_lm_head.pt"):
    """Write a head in the published form: base_model_name_or_path and the two numbers, and a pickle of a state dict."""
    config = {"base_model_name_or_path": "x/y", "medusa_num_heads": num_heads, "medusa_num_layers": num_layers}
    (path / "config.json").write_text(json.dumps(config))
    torch.save(tensors, path / file) if file.endswith(".pt") else save_file(tensors, path / file)
    return str(path)


def test_a_blockwise_head_adds_the_layer_to_the_state_and_asks_the_output_layer(tmp_path):
    torch.manual_seed(1)
    weights = {f"heads.{head}.weight": torch.randn(HIDDEN, HIDDEN) for head in range(2)}
    output, states = nn.Linear(HIDDEN, VOCAB), torch.randn(3, HIDDEN)
    heads = load(write(tmp_path, weights, num_heads=2), output)
    assert heads.max_depth == 2
    for depth, weight in enumerate(weights.values()):
        torch.testing.assert_close(heads(states, depth), output(states + states @ weight.T))


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_a_medusa_head_is_residual_blocks_and_an_output_layer_of_its_own(tmp_path, num_layers, file, prefix):
    tensors, states = medusa_tensors(num_layers=num_layers), torch.randn(3, HIDDEN)
    named = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    path = write_medusa(tmp_path, named, num_layers=num_layers, file=file)
    config = read_head(path)
    assert (config.num_heads, config.hidden_size, config.vocab_size) == (2, HIDDEN, VOCAB)
    heads = load(path)
    for head in range(2):
        expected = states  # `ResBlock` of its authors: x + SiLU(linear(x))
        for layer in range(num_layers):
            weight, bias = (tensors[f"{head}.{layer}.linear.{part}"] for part in ("weight", "bias"))
            expected = expected + nn.functional.silu(expected @ weight.T + bias)
        torch.testing.assert_close(heads(states, head), expected @ tensors[f"{head}.{num_layers}.weight"].T)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "eagle"}, "model_type is 'eagle'"),
        ({"hidden_size": 0}, "hidden_size must be in .*, got 0"),
        ({"vocab_size": "7"}, "vocab_size must be in .*, got '7'"),
        ({"num_heads": 17}, "num_heads must be in .*, got 17"),
        ({"feature_layers": [2]}, r"feature_layers is \[2\]"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_named(tmp_path, changes, says):
    with pytest.raises(CheckpointError, match=says):
        read_head(write(tmp_path, **changes))


def test_a_directory_without_heads_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="describes no head"):
        read_head(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="describes no head"):
        read_head(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match=r"has none of model\.safetensors"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({WEIGHT: torch.eye(5)}, r"is \(5, 5\), but should be \(4, 4\)"),
        ({WEIGHT: torch.full((4, 4), torch.nan)}, "NaN or infinite"),
        ({"lm_head.weight": torch.eye(4)}, "lacks 1 tensors of its heads, the first is heads.0.weight"),
        ({WEIGHT: torch.eye(4), "more": torch.eye(2)}, "1 tensors that its heads have no place for|too many"),
    ],
    ids=["shape", "nan", "another", "left over"],
)
def test_wrong_weights_are_named(tmp_path, weights, says):
    with pytest.raises(CheckpointError, match=says):
        load(write(tmp_path, weights))


def test_wrong_medusa_weights_are_named(tmp_path):
    tensors = medusa_tensors()
    del tensors["1.0.linear.bias"]
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors of its heads, the first is 1\.0\.linear\.bias"):
        load(write_medusa(tmp_path, tensors))
    with pytest.raises(CheckpointError, match=r"no output layer 0\.2\.weight"):
        read_head(write_medusa(tmp_path, medusa_tensors(), num_layers=2))


class Harmful:
    def __reduce__(self):
        return print, ("executed",)


def test_nothing_in_a_pickle_is_executed(tmp_path, capsys):
    write_medusa(tmp_path, medusa_tensors())
    (tmp_path / "medusa_lm_head.pt").write_bytes(pickle.dumps({"0.0.linear.weight": Harmful()}))
    with pytest.raises(CheckpointError, match="damaged, or no file of tensors alone"):
        read_head(str(tmp_path))
    assert "executed" not in capsys.readouterr().out


def test_damaged_weights_are_refused(tmp_path):
    path = write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="is damaged"):
        load(path)


def test_heads_of_another_target_are_refused(tmp_path):
    head = read_head(write(tmp_path))
    head.check_target(HIDDEN, VOCAB)
    with pytest.raises(CheckpointError, match="hidden_size is 4, not 8"):
        head.check_target(8, VOCAB)
    with pytest.raises(CheckpointError, match="vocab_size is 7, not 9"):
        head.check_target(HIDDEN, 9)


@pytest.mark.parametrize("stored", [[torch.eye(4)], {0: torch.eye(4)}, {"0.0.linear.weight": [1.0]}], ids=str)
def test_a_pickle_that_is_no_state_dict_is_refused(tmp_path, stored):
    write_medusa(tmp_path, stored)
    with pytest.raises(CheckpointError, match="damaged, or no file of tensors alone"):
        read_head(str(tmp_path))
