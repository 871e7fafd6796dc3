"""Heads are fitted to what the states become, and their figures are those of held-out text."""

from __future__ import annotations

import json

import pytest
import torch

from core.config import EngineConfig
from tests import checkpoints
from workers.heads import fit_heads, load_head
from workers.heads.fit import _Sums


def test_a_linear_relation_is_found():
    torch.manual_seed(4)
    states, change = torch.randn(500, 6), torch.randn(6, 6) / 3
    sums = _Sums(6)
    for part in states.split(50):
        sums.add(part, part + part @ change.T)
    torch.testing.assert_close(sums.solved(), change, atol=0.01, rtol=0.01)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """One layer, so that states depend little on the text before."""
    return checkpoints.write("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


def test_the_written_directory_is_what_engines_read(target, tmp_path):
    torch.manual_seed(1)
    texts = [torch.randint(0, 256, (64,)).tolist() for _ in range(12)]
    seen = []
    fitted = fit_heads(EngineConfig(str(target)), texts, num_heads=2, done=lambda: seen.append(1))
    assert len(seen) == len(texts), "ten to fit and two to try"
    assert fitted.num_tokens == 10 * 64
    assert all(0.0 <= share <= 1.0 for share in fitted.agreement)
    path = fitted.write(tmp_path / "heads")
    assert json.loads((path / "config.json").read_text())["agreement"] == [round(x, 4) for x in fitted.agreement]
    model = checkpoints.build("llama", num_hidden_layers=1)
    heads = load_head(str(path), model.lm_head, torch.float32, torch.device("cpu"))
    states = torch.randn(3, model.config.hidden_size)
    with torch.inference_mode():
        torch.testing.assert_close(heads(states, 1), model.lm_head(states + states @ fitted.weights[1].T))


def test_agreement_is_counted_at_the_token_that_the_head_guesses(target):
    """Texts of one token repeated: states hardly change, so that each head says what the target says."""
    texts = [[token] * 40 for token in range(40, 60)]
    fitted = fit_heads(EngineConfig(str(target)), texts, num_heads=2)
    assert min(fitted.agreement) > 0.5


def test_a_model_without_fused_attention_in_transformers_is_fitted(tmp_path):
    path = checkpoints.write("gpt_oss", tmp_path)
    assert len(fit_heads(EngineConfig(str(path)), [[1, 2, 3, 4]] * 4, num_heads=1).weights) == 1
