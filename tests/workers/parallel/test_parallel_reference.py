"""Two of our ranks against two of transformers' own tensor parallelism, on the same checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import checkpoints
from tests.workers.parallel.ranks import ADDRESS, Followers, free_port
from tests.workers.runtime.test_runtime import assert_same
from workers.step.rows import StepRows

IDS = [(7 * n) % 251 for n in range(30)]

REFERENCE = """
import sys, torch
import transformers.integrations.accelerate as device_maps
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

device_maps.is_accelerate_available = lambda: True  # it is asked for, and for one device not used
config = DistributedConfig(tp_size=2, ep_size=int(sys.argv[4]))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], distributed_config=config)
mlp = model.model.layers[1].mlp
split = mlp.experts.down_proj if hasattr(mlp, "experts") else mlp.down_proj.weight
assert split.to_local().numel() * 2 == split.numel()
with torch.inference_mode():
    logits = model(torch.tensor([eval(sys.argv[2])])).logits[0]
if torch.distributed.get_rank() == 0:
    torch.save(logits.clone(), sys.argv[3])
torch.distributed.destroy_process_group()
"""


def reference_logits(path: Path, result: Path, *, by_expert: bool) -> torch.Tensor:
    """Logits of all positions, by `DistributedConfig(tp_size=2)` in a world of its own."""
    port = str(free_port())
    processes = []
    for rank in range(2):
        world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESS}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", REFERENCE, str(path), str(IDS), str(result), str(1 + by_expert)],
                env=os.environ | world | {"MASTER_PORT": port},
            )
        )
    assert [process.wait(120) for process in processes] == [0, 0]
    logits: torch.Tensor = torch.load(result)
    return logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "by_expert"),
    [
        ("llama", False),
        ("qwen3", False),
        ("gemma2", False),
        ("mixtral", False),
        ("mixtral", True),
        ("glm4_moe", False),
        ("gpt_oss", True),
    ],
)
def test_two_ranks_compute_what_transformers_computes_on_two(family: str, by_expert: bool, tmp_path: Path) -> None:
    path = checkpoints.write(family, tmp_path / "model")
    want = reference_logits(path, tmp_path / "logits.pt", by_expert=by_expert)
    with Followers(1) as followers, followers.runtime(path, expert_parallel=by_expert) as runtime:
        kv = runtime.cache.new_sequence()
        got = torch.cat([runtime.forward([StepRows(kv, [token])]) for token in IDS])
    assert_same(got, want[:, : checkpoints.VOCAB_SIZE])
