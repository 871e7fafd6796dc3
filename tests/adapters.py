"""LoRA adapters of the tiny checkpoints in PEFT's format, and the same models with merged weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 4, 6


def write_adapter(
    path: Path, checkpoint: Path, seed: int = 0, targets: tuple[str, ...] = LINEAR, rank: int = RANK, **config: Any
) -> Path:
    """A random adapter of a checkpoint at `path`, wide enough to change every output; `config` has other settings."""
    random = torch.Generator().manual_seed(seed)
    path.mkdir(parents=True)
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": checkpoint.name, "r": rank,
        "lora_alpha": ALPHA, "lora_dropout": 0.05, "bias": "none", "use_rslora": False, "use_dora": False,
        "modules_to_save": None, "target_modules": list(targets), "init_lora_weights": True, "fan_in_fan_out": False,
    } | config  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(settings))
    tensors = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            num_out, num_in = weight.T.shape if settings["fan_in_fan_out"] else weight.shape
            for part, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = 0.3 * torch.randn(shape, generator=random)
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def edit_tensors(path: Path, change: Any) -> None:
    """Replace the tensors of an adapter by what `change` makes of them."""
    file = path / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)


def merge(path: Path, checkpoint: Path, adapter: Path) -> Path:
    """A copy of the checkpoint at `path` whose weights are W + scale * B @ A, in float32."""
    shutil.copytree(checkpoint, path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    weights, parts = load_file(checkpoint / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in {name.rpartition(".lora_")[0] for name in parts}:
        up, down = parts[f"{name}.lora_B.weight"], parts[f"{name}.lora_A.weight"]
        added = scale * up @ down
        weights[f"{name.removeprefix('base_model.model.')}.weight"] += added.T if config["fan_in_fan_out"] else added
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path
