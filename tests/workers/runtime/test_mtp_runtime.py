"""The MTP layer of a checkpoint computes what its formulas in plain torch do: over chunks, chains, trees and gaps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from core.config import EngineConfig
from core.records import Features
from core.speculation import ROOT, TokenTree
from tests import mtp
from workers.runtime import load_head_runtime
from workers.step import StepRows

TOKENS = [5, 17, 99, 4, 200, 31, 8, 77, 123]
TREE = TokenTree((7, 9, 7, 30, 2), (ROOT, ROOT, 0, 0, 1))
PATHS = ([7, 7], [7, 30], [9, 2])


@pytest.fixture(scope="module", params=mtp.NUM_LAYERS)
def written(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    return path, mtp.write(request.param, path)


@pytest.fixture(scope="module")
def states():
    random = torch.Generator().manual_seed(3)
    return torch.randn(len(TOKENS) - 1, 32, generator=random).bfloat16()


def features(states, first=0, end=None):
    rows = states[first:end].contiguous()
    return Features(first, rows.shape[1], rows.view(torch.int16).numpy().tobytes())


def runtime_of(path, **changes):
    config = EngineConfig(str(path), head=str(path), block_tokens=4, kv_cache_tokens=256)
    return load_head_runtime(replace(config, **changes), lambda _: None)


def assert_same(logits, expected):
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=2e-5)


def test_chain_and_tree(written, states):
    path, reference = written
    runtime = runtime_of(path)
    kv = runtime.cache.new_sequence()
    runtime.forward([StepRows(kv, TOKENS[:3], wants_logits=False, features=features(states))])
    (logits,) = runtime.forward([StepRows(kv, TOKENS[3:], features=features(states))])
    first = runtime.forward([StepRows(kv, [], TREE.prefix(2), 0)])
    second = runtime.forward([StepRows(kv, [], TREE, 2)])
    by_path = [reference.guessed(TOKENS, states.float(), guesses) for guesses in PATHS]
    assert_same(logits, by_path[0][0])
    nodes = [by_path[0][1], by_path[2][1], by_path[0][2], by_path[1][2], by_path[2][2]]
    assert_same(torch.cat([first, second]), torch.stack(nodes))


@pytest.mark.parametrize("first", [2, 5])
def test_it_attends_only_to_rows_whose_features_it_has(written, states, first):
    path, reference = written
    runtime = runtime_of(path)
    kv = runtime.cache.new_sequence()
    (logits,) = runtime.forward([StepRows(kv, TOKENS, features=features(states, first))])
    assert_same(logits, reference.guessed(TOKENS, states.float(), [], first + 1)[0])
