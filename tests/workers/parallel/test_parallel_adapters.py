"""Adapters over ranks: each rank has its slice of A or B, and the tokens are those of the merged model."""

from __future__ import annotations

import pytest

from core.errors import CheckpointError
from core.records import Adapter
from tests import checkpoints
from tests.adapters import merge, write_adapter
from tests.workers.engine.driving import EPOCH, answer_all
from tests.workers.engine.test_engine_adapters import add, alone, driver
from workers.parallel.commands import pack_adapter, unpack_adapter

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return checkpoints.write("qwen3", tmp_path_factory.mktemp("qwen3"))


def test_a_command_names_the_adapter():
    adapter = Adapter("a name", "/path/ä", "sha256:12")
    assert unpack_adapter(pack_adapter(3, adapter)) == (3, adapter)


def test_ranks_give_the_tokens_of_the_merged_model(followers, checkpoint, tmp_path):
    """Column-wise and row-wise layers, and the output layer, whose features are gathered."""
    paths = [
        write_adapter(tmp_path / "a", checkpoint, 1),
        write_adapter(tmp_path / "b", checkpoint, 2, ("o_proj", "lm_head", "k_proj")),
    ]
    merged = [merge(tmp_path / f"merged {path.name}", checkpoint, path) for path in paths]
    with followers.engine(checkpoint, EPOCH, block_tokens=4) as engine:
        engine.warm_up(lambda _: None)
        found = [add(engine, path) for path in paths]
        sessions = [driver(engine, each, session=f"{number}") for number, each in enumerate([*found, None])]
        got = [[] for _ in sessions]
        for _ in range(10):
            verdicts = answer_all(engine, [each.verify_request() for each in sessions])
            for each, verdict, tokens in zip(sessions, verdicts, got, strict=True):
                each.log.extend([verdict.next_token])
                each.held = verdict.held
                tokens.append(verdict.next_token)
        assert got == [alone(path, 10) for path in [*merged, checkpoint]]
        engine.release(["0"])
        assert engine.drop_adapter(found[0].digest)
        add(engine, paths[0])


def test_a_rank_that_cannot_read_an_adapter_ends_nothing(followers, checkpoint, tmp_path):
    path = write_adapter(tmp_path / "a", checkpoint)
    with followers.engine(checkpoint, EPOCH, block_tokens=4) as engine:
        weights = engine.read_adapter(Adapter("a", str(path)))
        (path / "adapter_model.safetensors").unlink()
        with pytest.raises(CheckpointError, match="adapter 'a' cannot be read by each rank"):
            engine.add_adapter(weights)
        assert driver(engine, None).run(4) == alone(checkpoint, 4)
