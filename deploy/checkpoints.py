"""Checks that checkpoints can be served, without reading their weights. All commands use it.

Knows what engines, vocabularies and requests need from a checkpoint's files; must not know Ray. Torch is imported
inside the function that needs it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from core.config import EngineConfig
from core.errors import ConfigError
from deploy.api import sampling_defaults
from orchestrator.text import Tokenizer
from workers.vocabulary import check_same_vocabulary

OFFLINE_VARIABLE = "HF_HUB_OFFLINE"


def check_models(target: EngineConfig, drafts: Mapping[str, EngineConfig], name: str) -> None:
    """Check a target and its drafts. `name` is what errors call the target; the keys of `drafts` name the drafts.

    Raises: StartupError.
    """
    from workers.heads import check_head  # imports torch
    from workers.model import check_checkpoint

    for path_name, engine in {name: target, **drafts}.items():
        check_directory(path_name, Path(engine.model))
        check_checkpoint(engine)
        if engine.head is not None:
            check_head(engine)
    Tokenizer.from_directory(target.model)
    sampling_defaults(target.model)
    for draft_name, draft in drafts.items():
        check_same_vocabulary(Path(target.model), Path(draft.model))
        _check_features(target, draft, draft_name)


def _check_features(target: EngineConfig, draft: EngineConfig, name: str) -> None:
    """Raises: StartupError if a draft's head reads hidden states that the target does not return."""
    if draft.head is None:
        return
    from workers.heads import read_head  # imports torch

    needed = read_head(draft.head, draft.model).feature_layers
    if needed != target.feature_layers:
        raise ConfigError(
            f"{name} is the head {draft.head}, which reads the target's layers {list(needed)}: "
            f"set feature_layers of the target's engine to these, not {list(target.feature_layers)}"
        )


def check_directory(name: str, path: Path) -> None:
    """Raises: ConfigError if the directory is missing; for a Hugging Face id it says how to download it."""
    if path.exists():
        return  # the loader reports a directory that is not a checkpoint
    if not _is_id(path):
        raise ConfigError(f"{name}: there is no directory {path}")
    is_offline = os.environ.get(OFFLINE_VARIABLE, "").upper() in ("1", "ON", "YES", "TRUE")  # same as huggingface_hub
    allowed = (
        f"{OFFLINE_VARIABLE} is set, so the hub must not be reached: bring the directory from elsewhere"
        if is_offline
        else f"if this is a model on the hub, fetch it first: hf download {path} --local-dir {path.name}"
    )
    raise ConfigError(f"{name}: there is no directory {path}, and nothing is downloaded here; {allowed}, and give it")


def _is_id(path: Path) -> bool:
    text = str(path)
    return text.count("/") == 1 and not path.is_absolute() and not text.startswith(".")
