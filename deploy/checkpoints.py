"""Whether checkpoints can be served, as far as can be told without their weights: the same for every command.

Knows what engines, vocabularies and requests ask of a checkpoint's files; must not know Ray. Imports torch in the
function that needs it.
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
    """Check a target, whose path is called `name` in errors, and its drafts, by the names of their paths.

    Raises: StartupError.
    """
    from workers.model import check_checkpoint  # imports torch

    for path_name, engine in {name: target, **drafts}.items():
        check_directory(path_name, Path(engine.model))
        check_checkpoint(engine)
    Tokenizer.from_directory(target.model)
    sampling_defaults(target.model)
    for draft in drafts.values():
        check_same_vocabulary(Path(target.model), Path(draft.model))


def check_directory(name: str, path: Path) -> None:
    """Raises: ConfigError, which says what to do where `path` is the id of a model on the Hugging Face hub."""
    if path.exists():
        return  # what is no checkpoint is refused in the loader's words
    if not _is_id(path):
        raise ConfigError(f"{name}: there is no directory {path}")
    is_offline = os.environ.get(OFFLINE_VARIABLE, "").upper() in ("1", "ON", "YES", "TRUE")  # as huggingface_hub has it
    allowed = (
        f"{OFFLINE_VARIABLE} is set, so the hub must not be reached: bring the directory from elsewhere"
        if is_offline
        else f"if this is a model on the hub, fetch it first: hf download {path} --local-dir {path.name}"
    )
    raise ConfigError(f"{name}: there is no directory {path}, and nothing is downloaded here; {allowed}, and give it")


def _is_id(path: Path) -> bool:
    text = str(path)
    return text.count("/") == 1 and not path.is_absolute() and not text.startswith(".")
