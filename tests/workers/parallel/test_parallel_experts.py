"""Mixtures of experts on two ranks, by slices of each expert and by whole experts, are what they are on one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from core.config import EngineConfig
from core.config.engine import Dtype
from core.errors import ConfigError
from core.records import Sampling
from tests import checkpoints
from tests.workers.engine.driving import EPOCH, Driver
from tests.workers.engine.test_target import random_tree
from tests.workers.parallel.ranks import Followers, config_of
from tests.workers.parallel.test_parallel import assert_company_changes_no_bits, assert_equal_to_one_rank, write
from workers.engine.target import TargetEngine
from workers.model.experts.summed_blocks import summed_blocks
from workers.model.shards import sharded_loader
from workers.model.shards.sharded_loader import ModelShard

pytestmark = pytest.mark.thorough

PROMPT = [5, 17, 99, 4, 200, 31]
SAMPLINGS = [Sampling(temperature=0.0), Sampling(temperature=0.9, seed=3)]
NUM_TOKENS = 26
ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1}
"""A router in float32 comes first in its blocks."""
WAYS = {"slices": False, "experts": True}
SHARED = {"glm4_moe", "deepseek_v2", "deepseek_v3"}
"""Families with experts that all tokens pass through, which their plans in transformers split, too."""


IN_TURN = {(family, list(WAYS)[number % 2 - 1]) for number, family in enumerate(checkpoints.EXPERTS)}
"""Each family in one of the ways: what the other would find is found by the next family."""
TWO = {("gpt_oss", "slices"), ("deepseek_v3", "experts")}
"""Experts of both layouts, and both kinds of attention, for what does not depend on more."""


def cases(families: Iterable[str], quick: set[tuple[str, str]]) -> list[Any]:
    """All families in all ways, of which those that are not `quick` are slow."""
    pairs = [(family, way) for family in families for way in WAYS]
    return [pytest.param(*pair, marks=() if pair in quick else pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(("family", "way"), cases(checkpoints.EXPERTS, IN_TURN))
def test_two_ranks_compute_what_one_does(followers: Followers, family: str, way: str, tmp_path: Path) -> None:
    assert_equal_to_one_rank(followers, write(family, tmp_path), expert_parallel=WAYS[way])


@pytest.mark.parametrize(("family", "way"), cases(checkpoints.EXPERTS, TWO))
def test_guesses_change_no_token_greedy_or_seeded(followers: Followers, family: str, way: str, tmp_path: Path) -> None:
    """Ranks verify random trees around what one process decodes without guesses."""
    path = write(family, tmp_path)
    alone = TargetEngine.load(config_of(path), EPOCH, lambda _: None)
    with followers.engine(path, EPOCH, block_tokens=4, expert_parallel=WAYS[way]) as engine:
        for number, sampling in enumerate(SAMPLINGS):
            want = Driver(alone, PROMPT, sampling, session=f"alone {number}").run(NUM_TOKENS + 4)
            got, num_accepted = guessed(engine, sampling, want, f"shared {number}")
            assert got == want[: len(got)]
            assert num_accepted > 8


def guessed(engine: TargetEngine, sampling: Sampling, want: list[int], session: str) -> tuple[list[int], int]:
    random, num_accepted = Random(1), 0
    driver = Driver(engine, PROMPT, sampling, session=session)
    driver.verify()
    while len(driver.log) < len(PROMPT) + NUM_TOKENS:
        done = len(driver.log) - len(PROMPT)
        num_accepted += len(driver.verify(random_tree(random, want[done : done + 4])).path)
    return list(driver.log.tokens)[len(PROMPT) :], num_accepted


@pytest.mark.parametrize(("family", "way"), cases(["qwen3_moe", "gpt_oss", "deepseek_v3"], TWO))
def test_a_deterministic_row_has_the_same_bits_alone_and_in_company(
    followers: Followers, family: str, way: str, tmp_path: Path
) -> None:
    with followers.runtime(write(family, tmp_path), deterministic=True, expert_parallel=WAYS[way]) as shared:
        shared.warm_up()
        assert_company_changes_no_bits(shared)


class Counted:
    """A view of a stored tensor that counts the numbers read from it."""

    def __init__(self, name: str, view: Any, read: dict[str, int]) -> None:
        self._name, self._view, self._read = name, view, read

    def __getitem__(self, index: Any) -> torch.Tensor:
        part: torch.Tensor = self._view[index]
        self._read[self._name] = self._read.get(self._name, 0) + part.numel()
        return part


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many numbers were read of each stored tensor."""
    open_tensors = sharded_loader.open_tensors
    read: dict[str, int] = {}

    @contextmanager
    def counted(*args: Any) -> Iterator[dict[str, Any]]:
        with open_tensors(*args) as stored:
            yield {name: Counted(name, view, read) for name, view in stored.items()}

    monkeypatch.setattr(sharded_loader, "open_tensors", counted)
    return read


def read_shard(
    path: Path, index: int, size: int, *, by_expert: bool, dtype: Dtype = "float32"
) -> tuple[ModelShard, Any]:
    shard = ModelShard(index, size, by_expert)
    config = EngineConfig(str(path), tensor_parallel=size, expert_parallel=by_expert, dtype=dtype)
    model, _ = shard.read([path / "model.safetensors"], AutoConfig.from_pretrained(path), config)
    return shard, model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", checkpoints.EXPERTS)
def test_a_rank_reads_its_part_of_the_experts_and_nothing_else(
    family: str, way: str, tmp_path: Path, num_read: dict[str, int]
) -> None:
    path = checkpoints.write(family, tmp_path)
    whole = sum(value.numel() for name, value in checkpoints.build(family).named_parameters() if ".experts." in name)
    for index in range(2):
        num_read.clear()
        _, model = read_shard(path, index, 2, by_expert=WAYS[way])
        held = sum(value.numel() for name, value in model.named_parameters() if ".experts." in name)
        assert held == whole // 2
        assert sum(count for name, count in num_read.items() if ".experts." in name) == held


@pytest.mark.parametrize("family", checkpoints.EXPERTS)
def test_a_block_is_added_up_once(family: str, tmp_path: Path) -> None:
    shard, model = read_shard(checkpoints.write(family, tmp_path), 0, 2, by_expert=False)
    is_attention_whole = family in {"gpt_oss", "deepseek_v3"}  # their plans in transformers leave it so
    num_layers = model.config.num_hidden_layers
    has_embedding = family != "gpt_oss"
    assert shard.num_sums == has_embedding + num_layers * (1 if is_attention_whole else 2)
    assert (len(list(summed_blocks(model, shard._shards))) > 0) == (family in SHARED)


def test_a_block_that_does_more_than_add_is_left_alone(tmp_path: Path) -> None:
    shard, model = read_shard(checkpoints.write("glm4_moe", tmp_path), 0, 2, by_expert=False)
    [name] = summed_blocks(model, shard._shards)
    block, norm = model.get_submodule(name), torch.nn.RMSNorm(32)
    forward = block.forward
    block.forward = lambda rows: norm(forward(rows))
    assert list(summed_blocks(model, shard._shards)) == []


@pytest.mark.parametrize(
    ("family", "way"), cases([*checkpoints.EXPERTS, "ernie4_5_moe"], {*IN_TURN, ("ernie4_5_moe", "slices")})
)
def test_in_bfloat16_some_weights_stay_in_float32_and_blocks_are_still_added_up_once(
    family: str, way: str, tmp_path: Path
) -> None:
    path = checkpoints.write(family, tmp_path, **(ERNIE if family == "ernie4_5_moe" else {}))
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    shard, model = read_shard(path, 0, 2, by_expert=WAYS[way], dtype="bfloat16")
    assert {name: value.dtype for name, value in model.state_dict().items()} == {
        name: value.dtype for name, value in whole.state_dict().items()
    }
    assert shard.num_sums <= 1 + 2 * model.config.num_hidden_layers


def test_whole_experts_need_ranks() -> None:
    with pytest.raises(ConfigError, match="expert_parallel must be false on one rank"):
        EngineConfig("m", expert_parallel=True)
