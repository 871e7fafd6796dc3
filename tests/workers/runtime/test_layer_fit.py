"""At load a head is tried with the layers that its files name, and with those one lower and one higher."""

from __future__ import annotations

import logging

import pytest
import torch

from core.config import EngineConfig
from tests import checkpoints, eagle
from workers.attention import ATTENTION
from workers.heads import load_engine_head
from workers.model import load
from workers.runtime import report_layers
from workers.runtime.heads import layer_fit

LAYERS = (1, 2, 3)
NUM_LAYERS = 5


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return checkpoints.write("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=NUM_LAYERS)


def head_of(target, path, **changes):
    """The loaded target, its head, and settings."""
    head, tensors = eagle.head_at(path / "head", eagle_aux_hidden_state_layer_ids=list(LAYERS), **changes)
    config = EngineConfig(str(target), head=head)
    loaded = load(config, lambda _: None)
    return loaded, load_engine_head(config, loaded, lambda _: None).head, config, tensors


@torch.inference_mode()
def guessed_by_hand(model, tensors, text, layers):
    output = model(torch.tensor([text]), output_hidden_states=True)
    states = torch.cat([output.hidden_states[layer][0] for layer in layers], dim=-1).bfloat16().float()
    reference = eagle.Reference(eagle.CONFIG, tensors, model.get_input_embeddings().weight, model.lm_head.weight)
    rows = reference.commit(text, states[:-1])
    guesses = torch.stack([reference.logits(row) for row in rows]).argmax(-1).tolist()
    return guesses, output.logits[0, 1:].argmax(-1).tolist()


def test_guesses_and_choices_are_those_worked_out_by_hand(target, tmp_path, monkeypatch):
    loaded, head, config, tensors = head_of(target, tmp_path)
    text = [(7 * token + 3) % 250 for token in range(20)]
    found, guesses_of, states_of, said = [], layer_fit._guesses, layer_fit._states, []
    monkeypatch.setattr(layer_fit, "_written", lambda _: text)
    monkeypatch.setattr(layer_fit, "_guesses", lambda *args: found.append(guesses_of(*args)) or found[-1])
    monkeypatch.setattr(layer_fit, "_states", lambda *args: found.append(states_of(*args)[1]) or states_of(*args))
    report_layers(head, loaded, config, said.append)
    model = checkpoints.build("llama", num_hidden_layers=NUM_LAYERS)
    choices, *by_shift = [each.tolist() for each in found]
    for shift, guesses in zip((0, -1, 1), by_shift, strict=True):
        by_hand = guessed_by_hand(model, tensors, text, [layer + shift for layer in LAYERS])
        assert (guesses, choices[1:]) == by_hand
    assert "by layers [1, 2, 3], 0." in said[0]
    assert "by layers [2, 3, 4], of 19 tokens" in said[0]
    assert loaded.model.config._attn_implementation == ATTENTION


@pytest.mark.parametrize("fits", [1, 2, 3])
def test_layers_that_fit_better_are_named(target, tmp_path, monkeypatch, caplog, fits):
    """A stub that guesses right by the states of one layer, the target's `fits` - 1, `fits` and `fits` + 1."""
    loaded, head, config, _ = head_of(target, tmp_path)
    known = {}

    def noted(model, text):
        known["states"], known["choices"] = states_and_choices(model, text)
        return known["states"], known["choices"]

    def right_by_one(_runtime, _text, features):
        is_right = torch.equal(features[:, : eagle.HIDDEN], known["states"][fits - 1][:-1])
        return known["choices"][1:] if is_right else known["choices"][1:] + 1

    states_and_choices = layer_fit._states
    monkeypatch.setattr(layer_fit, "_states", noted)
    monkeypatch.setattr(layer_fit, "_guesses", right_by_one)
    with caplog.at_level(logging.WARNING):
        report_layers(head, loaded, config, lambda _: None)
    layers = [fits - 1, fits, fits + 1]
    expected = [] if fits == 2 else [f"the head head fits layers {layers} better than [1, 2, 3]"]
    assert [record.getMessage().partition(",  which")[0][: len(expected[0])] for record in caplog.records] == expected


def test_the_last_layers_output_is_before_the_norm(target, tmp_path):
    loaded, *_ = head_of(target, tmp_path)
    states, _ = layer_fit._states(loaded.model.set_attn_implementation("eager") or loaded.model, [5, 6, 7])
    model = checkpoints.build("llama", num_hidden_layers=NUM_LAYERS)
    found: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    model(torch.tensor([[5, 6, 7]]))
    assert len(states) == NUM_LAYERS + 1
    torch.testing.assert_close(states[-1], found[0][0], atol=1e-5, rtol=1e-5)


def test_layers_that_a_head_names_by_their_inputs_are_taken_as_they_are(target, tmp_path):
    loaded, head, config, _ = head_of(target, tmp_path, feature_layers=list(LAYERS))
    said: list[str] = []
    report_layers(head, loaded, config, said.append)
    assert said == []


def test_the_text_is_the_targets_own_and_always_the_same(target, tmp_path):
    loaded, *_ = head_of(target, tmp_path)
    with layer_fit._plain_attention(loaded.model):
        texts = [layer_fit._written(loaded) for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == layer_fit.NUM_TOKENS
    assert len({*texts[0]}) > 10


def test_an_error_in_the_trial_is_told_and_stops_nothing(target, tmp_path, monkeypatch, caplog):
    loaded, head, config, _ = head_of(target, tmp_path)

    def broken(_loaded):
        raise RuntimeError("no text")

    monkeypatch.setattr(layer_fit, "_written", broken)
    with caplog.at_level(logging.WARNING):
        report_layers(head, loaded, config, lambda _: None)
    assert "which layers the head" in caplog.text
    assert "no text" in caplog.text
