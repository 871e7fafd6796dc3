"""Default settings of a pair, chosen by the hardware and the checkpoints.

`decide` is pure: facts in, settings and reasons out. `detect_facts` collects the facts of this machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.config import EngineConfig, ServiceConfig, WorkerConfig
from deploy.sources import Setting

SOURCE = "what is here"
"""Source of these settings in errors and --print-config."""
GPU_BLOCK_TOKENS = 64
"""Rows that one program of the attention kernel reads at a time: one look-up in the block table for each block."""
GPU_STEP_TOKENS = 2048
"""Rows of a step on a GPU. Larger steps compute prompts no faster, and 62 sessions have room for blocks of 32. Each row
needs memory for activations (0.25 MB in a 32B model: half a gigabyte for all). Each verified row also needs its
logits, 6 bytes per token of the vocabulary (0.9 MB for 152,000: 1.9 GB for all). Rows are judged a hundred at a
time, which needs another 1.3 GB."""
GPU_CHUNK_TOKENS = 1024
"""Most prefill rows beside decoding. `prefill_stretch` picks a number below it from measured step times."""
SHARES = {"target": 0.7, "draft": 0.25}
"""Fraction of a GPU's memory for each model if both share one GPU."""
FRACTIONS = {"target": 0.7, "draft": 0.3}
"""`num_gpus` in Ray for each model if both share one GPU."""


@dataclass(frozen=True, slots=True)
class Facts:
    num_gpus: int
    num_cpus: int
    dtypes: dict[str, str | None]
    """Dtype of each role's weights, as its config.json names it; None if it names none."""
    has_bfloat16: bool = False
    """Whether the processor multiplies bfloat16 numbers."""


def decide(facts: Facts) -> tuple[Sequence[Setting], Sequence[str]]:
    """Settings and the reasons for them: a GPU with the checkpoint's dtype if there is one, else the CPU."""
    roles = tuple(facts.dtypes)
    if facts.num_gpus == 0:
        return _on_cpu(facts)
    is_shared = len(roles) > facts.num_gpus
    settings = [setting for role in roles for setting in _on_gpu(role, facts.dtypes[role], is_shared=is_shared)]
    gpus = f"{facts.num_gpus} GPU{'s' if facts.num_gpus > 1 else ''}"
    where = "which both models share" if is_shared else "one for each model"
    reasons = [f"{gpus}, {where}: KV from its memory, attention in place, small steps as CUDA graphs"]
    reasons += [
        f"{role}: bfloat16, since {facts.dtypes[role]} is not computed here"
        for role in roles
        if facts.dtypes[role] not in ("bfloat16", "float32", None)
    ]
    return settings, reasons


def _on_cpu(facts: Facts) -> tuple[list[Setting], list[str]]:
    """All cores, divided among the models. Weights of 16 bits stay so where the processor computes with them: they are
    read in half the time."""
    share = max(1, facts.num_cpus // len(facts.dtypes))
    dtypes = {
        role: "bfloat16" if facts.has_bfloat16 and stored in ("bfloat16", "float16") else "float32"
        for role, stored in facts.dtypes.items()
    }
    settings = [Setting(f"{role}.engine.num_threads", share, SOURCE) for role in dtypes]
    settings += [Setting(f"{role}.engine.dtype", dtype, SOURCE) for role, dtype in dtypes.items()]
    counted = f"{share} thread{'s' if share > 1 else ''} an engine of {facts.num_cpus} CPUs"
    used = " and ".join(dict.fromkeys(dtypes.values()))
    reasons = [f"no GPU: on the CPU in {used}, {counted}"]
    reasons += [
        f"{role}: float16 is rounded to bfloat16; --dtype float32 keeps its digits, at half the speed"
        for role, stored in facts.dtypes.items()
        if stored == "float16" and dtypes[role] == "bfloat16"
    ]
    return settings, reasons


def _on_gpu(role: str, stored: str | None, *, is_shared: bool) -> list[Setting]:
    engine = {
        "device": "cuda",
        "dtype": "float32" if stored == "float32" else "bfloat16",
        "kv_cache_tokens": None,
        "kv_memory_share": SHARES[role] if is_shared else EngineConfig("any").kv_memory_share,
        "block_tokens": GPU_BLOCK_TOKENS,
        "max_step_tokens": GPU_STEP_TOKENS,
        "prefill_chunk_tokens": GPU_CHUNK_TOKENS,
        "compile": True,
    }
    values = {f"{role}.engine.{name}": value for name, value in engine.items()}
    values[f"{role}.num_gpus"] = FRACTIONS[role] if is_shared else 1.0
    return [Setting(name, value, SOURCE) for name, value in values.items()]


def detect_facts(target: Path, draft: Path | None) -> Facts:
    """The facts of this machine and these checkpoints. Imports torch."""
    import torch

    from workers.native import HAS_PAIRS

    dtypes = {"target": _stored_dtype(target)}
    if draft is not None:
        dtypes["draft"] = _stored_dtype(draft)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Facts(num_gpus, num_cpus, dtypes, HAS_PAIRS)


def _stored_dtype(directory: Path) -> str | None:
    """The dtype in config.json or of its text tower; None if the file cannot be read, which the loader reports."""
    try:
        config: Any = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    tower = config.get("text_config") if isinstance(config, dict) else None
    parts = (part for part in (config, tower) if isinstance(part, dict))
    found = (part.get(name) for part in parts for name in ("dtype", "torch_dtype"))
    return next((str(dtype) for dtype in found if dtype is not None), None)


def describe_settings(config: ServiceConfig) -> list[str]:
    """One line for each model, with its final settings."""
    extra = {f"extra_drafts.{number}": worker for number, worker in enumerate(config.extra_drafts)}
    workers = {"target": config.target, "draft": config.draft, **extra}
    return [f"{role}: {_describe(worker)}" for role, worker in workers.items() if worker is not None]


def _describe(worker: WorkerConfig) -> str:
    engine = worker.engine
    is_gpu = engine.device.startswith("cuda")
    memory = "the GPU's memory, weights included" if is_gpu else "free memory"
    kv = f"{engine.kv_cache_tokens} tokens" if engine.kv_cache_tokens else f"{engine.kv_memory_share:.0%} of {memory}"
    attention = f"{'paged, in place, ' if is_gpu else ''}blocks of {engine.block_tokens}"
    slowest = "eager" if is_gpu else "native programs if the model allows"
    steps = ("CUDA graphs" if is_gpu else "compiled") if engine.compile else slowest
    parts = (f"device {engine.device}", engine.dtype, f"KV {kv}", f"attention {attention}", f"steps {steps}")
    layers = () if engine.layers is None else (f"layers {','.join(map(str, engine.layers))} of {engine.model}",)
    return ", ".join((*layers, *parts, f"replicas {worker.num_replicas}"))
