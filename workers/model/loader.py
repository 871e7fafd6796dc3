"""From a checkpoint directory to a model that the runtime can serve, or one clear line that says why not.

Knows files; `workers.model.servable` knows which models can be run. Must not know the KV cache, sessions or sampling.
Weights are safetensors only, code is what transformers ships, nothing is fetched: `trust_remote_code` cannot be set.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from core.config import EngineConfig
from core.errors import CheckpointError, ConfigError, UnsupportedModel, first_line
from core.records import ModelInfo
from workers.attention import ATTENTION
from workers.model.checkpoint import INDEX, check_stored, meta_model
from workers.model.digest import digest
from workers.model.layers import LayerSubset, layer_list
from workers.model.servable import check_architecture, context_limit, probe_layers
from workers.model.sharded_loader import ModelShard, read_by_tensor
from workers.step import LayerShape
from workers.vocabulary import read_vocabulary

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode on its device, and what the runtime must know of it."""

    model: Any
    """A transformers PreTrainedModel whose attention is ours."""
    info: ModelInfo
    layers: tuple[LayerShape, ...]


def load(config: EngineConfig, progress: Callable[[str], None], shard: ModelShard | None = None) -> LoadedModel:
    """The model of `config.model`, or one rank's shard of it, checked to be one that the runtime computes exactly.

    Raises: CheckpointError for missing, foreign, damaged or incomplete files; UnsupportedModel for architectures that
    the attention interface does not carry, or that this number of ranks cannot share.
    """
    if config.tensor_parallel != (shard.size if shard else 1):
        raise ConfigError(f"tensor_parallel is {config.tensor_parallel}, but this engine runs on its own")
    path = Path(config.model)
    progress(f"reading {path / 'config.json'}")
    model_config, max_context = _check(config)
    subset = _subset(config)
    with quiet_transformers():
        progress(f"loading {model_config.architectures[0] if model_config.architectures else model_config.model_type}")
        if subset is not None:
            model = _read_layers(path, config, model_config, subset)
            num_parameters = sum(parameter.numel() for parameter in model.parameters())
        elif shard is None:
            model = _read_whole(path, config, model_config)
            num_parameters = sum(parameter.numel() for parameter in model.parameters())
        else:
            model, num_parameters = shard.read(_weight_files(path), model_config, config)
    model_config = model_config if subset is None else subset.config_of(model_config)
    layers = probe_layers(model, model_config)
    info = _describe(model, model_config, config, max_context, num_parameters)
    progress(f"loaded {info.num_parameters / 1e6:.1f}M parameters, {info.dtype} on {info.device}")
    return LoadedModel(model, info, layers)


def digest_of(config: EngineConfig) -> str:
    """Of a checkpoint that has been loaded (`workers.model.digest`)."""
    path = Path(config.model)
    return digest(path / "config.json", _weight_files(path), config.digest_whole_bytes)


def reference_model(config: EngineConfig) -> Any:
    """The model with the attention of transformers itself, for passes over whole texts without KV. Raises: as `load`
    does."""
    path = Path(config.model)
    model_config, _ = _check(config)
    with quiet_transformers():
        return _read_weights(path, config, model_config, attention="sdpa")


def check_checkpoint(config: EngineConfig) -> None:
    """Check everything that can be checked without the weights. Raises: as `load` does."""
    _check(config)


def survey(config: EngineConfig) -> ModelInfo:
    """What `load` would say of the model, without reading a weight.

    Names, shapes and types of all tensors are compared with config.json, by the headers of the files. Problems that
    only a forward pass shows, such as a layer that misuses the attention interface, are not found. Raises: as `load`
    does.
    """
    path = Path(config.model)
    model_config, max_context = _check(config)
    with quiet_transformers():
        model = meta_model(model_config, config.dtype)
        _read_generation_config(path, model)
    check_stored(path, _weight_files(path), model)
    subset = _subset(config)
    if subset is not None:
        model = meta_model(subset.config_of(model_config), config.dtype)
        _read_generation_config(path, model)
    return _describe(model, model_config, config, max_context, sum(each.numel() for each in model.parameters()))


def _check(config: EngineConfig) -> tuple[Any, int]:
    """The model's own configuration, and the number of positions that may be used."""
    path = Path(config.model)
    _check_files(path)
    with quiet_transformers():
        model_config = _read_config(path)
        check_architecture(model_config)
        if (subset := _subset(config)) is not None:
            subset.check(model_config, config.model)
        if config.tensor_parallel > 1:
            ModelShard(0, config.tensor_parallel).check(model_config)
        return model_config, context_limit(model_config, config)


def _check_files(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise CheckpointError(f"{path} has no {name}")
    for shard in _weight_files(path):
        if not shard.is_file():
            raise CheckpointError(f"{path} lacks {shard.name}, which its index names")


def _weight_files(path: Path) -> Sequence[Path]:
    """The one file of weights, or those that the index of a sharded checkpoint names."""
    index = path / INDEX
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    if index.is_file():
        try:
            return sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not an index of shards: {error!r}") from error
    others = sorted(
        file.name for suffix in ("bin", "pt", "pth", "gguf", "safetensors", "h5") for file in path.glob(f"*.{suffix}")
    )
    found = f"found {', '.join(others)}" if others else "found no weights at all"
    raise CheckpointError(f"{path} has no model.safetensors ({found}); only safetensors weights are loaded")


def _read_config(path: Path) -> Any:
    """Raises: CheckpointError for what is no config; UnsupportedModel for one that transformers has no code for."""
    try:
        raw = json.loads((path / "config.json").read_text())
    except ValueError as error:
        raise CheckpointError(f"{path / 'config.json'} is not JSON: {error}") from error
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError) as error:
        kind = raw.get("model_type") if isinstance(raw, dict) else None
        raise UnsupportedModel(
            f"{path} is of model type {kind!r}, which transformers cannot build from its own code"
        ) from error


def _read_whole(path: Path, config: EngineConfig, model_config: PretrainedConfig) -> Any:
    """Tensor by tensor where it goes to another device, so that the host need not have room for all of it."""
    if torch.device(config.device).type != "cpu":
        try:
            return read_by_tensor(_weight_files(path), model_config, config)
        except UnsupportedModel as reason:
            logger.info("the weights pass through the host's memory as a whole: %s", reason)
    return _read_weights(path, config, model_config)


def _read_weights(path: Path, config: EngineConfig, model_config: PretrainedConfig, attention: str = ATTENTION) -> Any:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=model_config,
            dtype=getattr(torch, config.dtype),
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (SafetensorError, OSError, RuntimeError) as error:
        raise _damaged(path, error) from error
    _check_complete(path, report)
    return model.to(config.device).eval()


def _read_layers(path: Path, config: EngineConfig, model_config: PretrainedConfig, subset: LayerSubset) -> Any:
    """The model of these layers alone; the others are never read."""
    name, _ = layer_list(meta_model(model_config, config.dtype))
    try:
        with subset.open(_weight_files(path), name.rpartition(".")[2]) as tensors:
            model, report = MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)].from_pretrained(
                None,
                config=subset.config_of(model_config),
                state_dict=tensors,
                dtype=getattr(torch, config.dtype),
                attn_implementation=ATTENTION,
                output_loading_info=True,
            )
    except (SafetensorError, OSError, RuntimeError) as error:
        raise _damaged(path, error) from error
    _check_complete(path, report)
    _read_generation_config(path, model)
    return model.to(config.device).eval()


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"the weights in {path} are damaged or do not fit config.json: {first_line(error)}")


def _check_complete(path: Path, report: Mapping[str, Any]) -> None:
    """Raises: CheckpointError."""
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise CheckpointError(f"the weights in {path} lack {len(missing)} tensors, the first is {missing[0]}")


def _read_generation_config(path: Path, model: Any) -> None:
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)


def _subset(config: EngineConfig) -> LayerSubset | None:
    return None if config.layers is None else LayerSubset(config.layers)


def _describe(model: Any, model_config: Any, config: EngineConfig, max_context: int, num_parameters: int) -> ModelInfo:
    path = Path(config.model)
    return ModelInfo(
        name=_name(path, config),
        architecture=type(model).__name__,
        dtype=config.dtype,
        device=config.device,
        num_parameters=num_parameters,
        vocab_size=min(1 + max(read_vocabulary(path)), model.get_input_embeddings().num_embeddings),
        max_context_tokens=max_context,
        kv_cache_tokens=config.kv_cache_tokens or 0,  # the runtime sets it
        eos_token_ids=_eos_token_ids(model),
        bos_token_id=model_config.bos_token_id,
        layers=config.layers or (),
    )


def _name(path: Path, config: EngineConfig) -> str:
    """Of the directory; and the layers, where not all are loaded."""
    name = path.resolve().name
    return name if config.layers is None else f"{name}[{','.join(map(str, config.layers))}]"


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """From generation_config.json, which transformers fills from config.json where there is none."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = model.config.eos_token_id
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No warnings or progress bars on the terminal: problems are raised, progress goes to `progress`."""
    verbosity, had_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
