"""Steps with adapters: prompts, chains and trees of several sequences in one, on each backend."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from core.errors import StartupError, UnsupportedModel
from core.records import Adapter
from core.speculation import ROOT, TokenTree
from tests.adapters import write_adapter
from tests.checkpoints import runtime, write
from workers.model import lora
from workers.runtime.adapters import Adapters
from workers.step import StepRows

TREE = TokenTree((3, 4, 5, 6), (ROOT, 0, 0, ROOT))
TEXTS = [([7, 8, 9, 10], 1, TREE), ([11, 12], 0, TokenTree((), ())), ([13, 14, 15], 2, TREE), ([16, 17, 18], 1, TREE)]
"""Tokens, the number of the adapter, and guesses of each sequence."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def adapters(checkpoint, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(root / "a", checkpoint, 1, ("q_proj", "lm_head")),
        write_adapter(root / "b", checkpoint, 2, ("down_proj", "lm_head"), rank=7),
    ]


def loaded(checkpoint, adapters, **settings):
    found = runtime(checkpoint, **settings)
    found.warm_up()
    for number, path in enumerate(adapters, 1):
        found.add_adapter(number, found.read_adapter(Adapter(path.name, str(path))))
    return found


def batch_of(found, texts=TEXTS):
    return [StepRows(found.cache.new_sequence(), tokens, tree, adapter=number) for tokens, number, tree in texts]


def apart(found):
    return torch.cat([found.forward(batch_of(found, [text])) for text in TEXTS])


SETTINGS = {"plain": {}, "exact": {"deterministic": True}, "rounded": {"deterministic": True, "dtype": "bfloat16"}}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_step_of_several_sequences_gives_each_its_own_logits(checkpoint, adapters, settings):
    found = loaded(checkpoint, adapters, **settings)
    together, alone = found.forward(batch_of(found)), apart(found)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    assert not settings or torch.equal(together, alone)
    plain = found.forward(batch_of(found, [(tokens, 0, tree) for tokens, _, tree in TEXTS]))
    is_adapted = [bool(number) for _, number, tree in TEXTS for _ in range(1 + len(tree))]
    differs = (plain - together).abs().amax(-1) > 0.01
    assert differs.tolist() == is_adapted


def test_compiled_rows_keep_their_bits_beside_rows_with_adapters(checkpoint, adapters, monkeypatch):
    """No backend with other bits is built here, so the steps are watched."""
    found = loaded(checkpoint, adapters, deterministic=True)
    monkeypatch.setattr(type(found.backends), "is_compiled", True)
    steps, run = [], found.run
    monkeypatch.setattr(found, "run", lambda step: (steps.append(step), run(step))[1])
    together = found.forward(batch_of(found))
    assert [step.has_adapters for step in steps] == [False, True]
    assert torch.equal(together, apart(found))
    steps.clear()
    found.forward(batch_of(found, [TEXTS[0], TEXTS[2]]))
    assert len(steps) == 1, "there is nothing to keep apart"


def test_deterministic_says_so_where_an_adapter_breaks_it(checkpoint, adapters, monkeypatch, caplog):
    def by_number_of_rows(self, rows, pair):
        return (rows @ pair.down.T @ pair.up.T) * (1 + 0.01 * len(rows))

    monkeypatch.setattr(Adapters, "_product", by_number_of_rows)
    with caplog.at_level(logging.WARNING):
        loaded(checkpoint, adapters[:1], deterministic=True)
    assert "deterministic is NOT met with adapter a" in caplog.text


def test_bfloat16_is_close_to_float32(checkpoint, adapters):
    exact, rounded = (loaded(checkpoint, adapters, dtype=dtype) for dtype in ("float32", "bfloat16"))
    want, got = exact.forward(batch_of(exact)), rounded.forward(batch_of(rounded))
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert errors.max() < 0.05


def test_a_module_that_the_model_does_not_call_has_no_adapter(checkpoint, adapters, monkeypatch):
    """Some attentions multiply by a module's weights without calling it."""
    found = loaded(checkpoint, adapters[:1])
    other = found.read_adapter(Adapter("other", str(adapters[1])))
    layer = found.context.model.get_submodule("model.layers.1.mlp.down_proj")
    monkeypatch.setattr(layer, "_call_impl", layer.forward)  # hooks are called there
    monkeypatch.setattr(type(layer), "__call__", lambda self, rows: self._call_impl(rows))
    with pytest.raises(
        UnsupportedModel, match=r"adapter 'other': the model does not call model\.layers\.1\.mlp\.down_proj"
    ):
        found.add_adapter(2, other)
    found.forward(batch_of(found, [TEXTS[0]]))


def test_without_memory_an_adapter_is_refused(checkpoint, adapters, monkeypatch):
    found = loaded(checkpoint, [])

    def full(*_args):
        raise torch.OutOfMemoryError("CUDA out of memory\nand more")

    monkeypatch.setattr(lora, "_slices", full)
    with pytest.raises(
        StartupError, match=r"adapter 'a' in .*: the device has no memory left for it: CUDA out of memory$"
    ):
        found.read_adapter(Adapter("a", str(adapters[0])))


def test_dropped_adapters_leave_the_others(checkpoint, adapters):
    found = loaded(checkpoint, adapters)
    want = found.forward(batch_of(found, [TEXTS[2]]))
    found.drop_adapter(1)
    assert torch.equal(found.forward(batch_of(found, [TEXTS[2]])), want)
    with pytest.raises(KeyError):
        found.forward([replace(rows, adapter=1) for rows in batch_of(found, [TEXTS[1]])])
