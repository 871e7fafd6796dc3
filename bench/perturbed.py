"""Copies of a checkpoint with noise on their weights: drafts that agree with the original to a degree, at its own cost.

For timing that is too short for a pair of models of different sizes. Knows tensors; must not know who runs them.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def perturbed(source: Path, noise: float, directory: Path, seed: int = 0) -> Path:
    """`source` with normal noise on each matrix, of so many times its own deviation; written below `directory` once."""
    digest = hashlib.sha256(f"{noise} {seed}".encode() + (source / WEIGHTS).read_bytes()).hexdigest()
    out = directory / f"{source.name}-perturbed-{digest[:12]}"
    if not out.is_dir():
        unfinished = out.with_name(f".{out.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(source, unfinished)
        _perturb(unfinished / WEIGHTS, noise, seed)
        unfinished.rename(out)
    return out


def _perturb(path: Path, noise: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(path)
    for name, tensor in sorted(tensors.items()):
        if tensor.dim() == 2:  # norms have one dimension
            weights = tensor.float()
            shaken = weights + noise * weights.std() * torch.randn(weights.shape, generator=generator)
            tensors[name] = shaken.to(tensor.dtype)
    save_file(tensors, path, metadata={"format": "pt"})
