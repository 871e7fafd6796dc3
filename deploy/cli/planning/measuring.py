"""Shared by `outrider check --measure` and `outrider layers`: options, prompts and the settings of the engine.

Imports torch only in the function that needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from core.config import Dtype, EngineConfig
from core.ranges import Range
from deploy.cli.options import number

PANEL = "Measuring"
SPARE_KV_TOKENS = 1024
"""KV beyond a prompt and its output, in tokens: for timed passes and for the warm-up."""


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions:
    """Options of commands that run models on prompts in this process."""

    tokens: Annotated[
        int, number(Range(2, 4096, is_whole=True), "Length of each output at most, in tokens", panel=PANEL)
    ] = 64
    gamma: Annotated[int, number(Range(1, 64, is_whole=True), "Draft length at most, in tokens", panel=PANEL)] = 8
    dtype: Annotated[Dtype, Option(help="Type of weights and arithmetic.", rich_help_panel=PANEL)] = "float32"
    device: Annotated[
        str, Option(metavar="DEVICE", help="Device, as torch names it: cpu, cuda, cuda:0.", rich_help_panel=PANEL)
    ] = "cpu"
    threads: Annotated[int, number(Range(1, 1024, is_whole=True), "CPU threads of a pass", panel=PANEL)] = 1
    json: Annotated[Path | None, Option(metavar="FILE", help="Write all figures to FILE.", rich_help_panel=PANEL)] = (
        None
    )


def prepare(
    options: MeasuringOptions, target: Path, texts: Sequence[str]
) -> tuple[list[tuple[int, ...]], EngineConfig]:
    """The token ids of each text, and the target's settings with KV for the longest text and its output.

    Sets the number of threads of this process. Raises: CheckpointError, ConfigError.
    """
    import torch

    from deploy.checkpoints import check_directory
    from orchestrator.text import Tokenizer

    check_directory("--target", target)
    torch.set_num_threads(options.threads)
    tokenizer = Tokenizer.from_directory(target)
    prompts = [tokenizer.encode(text) for text in texts]
    config = EngineConfig(
        str(target),
        dtype=options.dtype,
        device=options.device,
        num_threads=options.threads,
        kv_cache_tokens=max(map(len, prompts)) + options.tokens + SPARE_KV_TOKENS,
    )
    return prompts, config
