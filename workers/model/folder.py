"""Files of a checkpoint's directory: checks that they exist, and reads config.json and generation_config.json.

Must not know architectures (`workers.model.servable`) or tensors (`workers.model.checkpoint`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig
from transformers.utils import logging as transformers_logging

from core.errors import CheckpointError, UnsupportedModel, cause, first_line
from workers.model.checkpoint import INDEX
from workers.model.scaled import DECLARED, MODELOPT, ScaledWeights, read_scheme

SINGLE = "model.safetensors"
SAME_CODE = {"kimi_k2": "deepseek_v3"}
"""Model types published with code of their own that is the code of another type."""
COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
NOT_COPIED = frozenset({INDEX, "config.json", MODELOPT})
OTHER_WEIGHTS = ("bin", "pt", "pth", "gguf", "safetensors", "h5")


def check_files(path: Path) -> Sequence[Path]:
    """Return the weight files. Raises: CheckpointError for a directory without a file that every checkpoint has."""
    if path.suffix == ".gguf":
        raise CheckpointError(f"{path} is a GGUF file; convert it first: outrider convert {path} DIR")
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")
    files = _weight_files(path)
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise CheckpointError(f"{path} has no {name}")
    for shard in files:
        if not shard.is_file():
            raise CheckpointError(f"{path} lacks {shard.name}, which its index names")
    return files


def _weight_files(path: Path) -> Sequence[Path]:
    """The single weight file, or the files that the index of a sharded checkpoint lists."""
    index = path / INDEX
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    if index.is_file():
        try:
            return sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not an index of shards: {error!r}") from error
    others = sorted(file.name for suffix in OTHER_WEIGHTS for file in path.glob(f"*.{suffix}"))
    gguf = next((name for name in others if name.endswith(".gguf")), None)
    found = f"found {', '.join(others)}" if others else "found no weights at all"
    hint = f"; convert it first: outrider convert {path / gguf} DIR" if gguf else ""
    raise CheckpointError(f"{path} has no {SINGLE} ({found}); only safetensors weights are served{hint}")


def read_config(path: Path) -> tuple[Any, ScaledWeights | None]:
    """The configuration, as of a model that is not quantized, and how stored weights are scaled.

    `path` is a checkpoint's directory, or its config.json alone.
    Raises: CheckpointError for an invalid config; UnsupportedModel for one that transformers has no code for.
    """
    file = path if path.is_file() else path / "config.json"
    try:
        raw = json.loads(file.read_text())
    except OSError as error:
        raise CheckpointError(f"{path} is neither a config.json nor a directory with one") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    scaled = read_scheme(path, raw)
    try:
        if raw.get("model_type") in SAME_CODE:
            same = SAME_CODE[raw["model_type"]]
            config = CONFIG_MAPPING[same].from_dict({**raw, "model_type": same})
        else:
            config = AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the model's own code checks the config, and may raise anything
        raise UnsupportedModel(
            f"{path} is of model type {raw.get('model_type')!r}, which transformers cannot build from its own code: "
            f"{cause(error)}"
        ) from error
    for each in (config, config.get_text_config()):
        vars(each).pop(DECLARED, None)  # with it, transformers would quantize the model
    return config, scaled


def read_generation_config(path: Path) -> GenerationConfig | None:
    """Return None without the file. Raises: CheckpointError."""
    file = path / "generation_config.json"
    if not file.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers' checks of single values may raise anything
        raise CheckpointError(f"{file} cannot be read: {first_line(error)}") from error


def copy_settings(path: Path, out: Path) -> None:
    """Copy the tokenizer and other settings beside weights in `out`, and let all read these who may read settings."""
    for file in {file for pattern in COPIED for file in path.glob(pattern)}:
        if file.name not in NOT_COPIED:
            shutil.copyfile(file, out / file.name)
    for file in out.glob("*.safetensors"):
        file.chmod((out / "tokenizer.json").stat().st_mode)  # safetensors lets nobody else read them


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress transformers' warnings and progress bars: problems are raised, and progress goes to `progress`."""
    verbosity, had_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
