"""Loads a checkpoint directory into a model that the runtime can serve, or raises one line that says why not.

Knows files; `workers.model.servable` knows which models can be served. Must not know the KV cache, sessions or
sampling. Weights are safetensors only, model code comes from transformers only, and nothing is downloaded:
`trust_remote_code` cannot be set.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from core.config import EngineConfig
from core.errors import CheckpointError, ConfigError, UnsupportedModel, cause, first_line
from core.records import ModelInfo
from workers.attention import ATTENTION, keep_latents
from workers.model.checkpoint import check_stored, meta_model, open_tensors
from workers.model.contained import Rename, language_model
from workers.model.digest import digest
from workers.model.encoder_decoder import check_settings, serve_as_decoder, start_tokens
from workers.model.experts import compute_in_tiles
from workers.model.folder import check_files, quiet_transformers, read_config, read_generation_config
from workers.model.layers import LayerSubset, layer_list
from workers.model.lora import read_adapter, starting_adapters
from workers.model.scaled import ScaledWeights
from workers.model.servable import (
    check_architecture,
    check_recurrent,
    class_of,
    context_limit,
    probe_layers,
    source_limit,
)
from workers.model.sharded_loader import ModelShard, read_by_tensor
from workers.recurrent import Mixer, describe
from workers.step import LayerShape
from workers.vocabulary import read_vocabulary

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode on its device, with what the runtime needs to know."""

    model: Any
    """A transformers PreTrainedModel that calls `workers.attention`."""
    info: ModelInfo
    layers: tuple[LayerShape, ...]
    mixers: tuple[Mixer, ...] = ()
    """The model's recurrent mixers."""
    shard: ModelShard | None = None
    """The part of the model that this rank holds; None if it is whole."""
    rename: Rename | None = None
    """The model's names for those of the checkpoint; None if they are the same."""


def load(config: EngineConfig, progress: Callable[[str], None], shard: ModelShard | None = None) -> LoadedModel:
    """Load the model of `config.model`, or one rank's shard of it, if the runtime can compute it exactly.

    Raises: CheckpointError for missing, foreign, damaged or incomplete files; UnsupportedModel for architectures that
    the attention interface does not support, or that cannot be split over this number of ranks.
    """
    if config.tensor_parallel != (shard.size if shard else 1):
        raise ConfigError(f"tensor_parallel is {config.tensor_parallel}, but this engine runs on its own")
    progress(f"reading {Path(config.model) / 'config.json'}")
    checkpoint = _check(config)
    model_config = checkpoint.model_config
    with quiet_transformers():
        if checkpoint.limit:
            progress(f"the context is limited to {checkpoint.max_context} tokens: {checkpoint.limit}")
        if checkpoint.scaled is not None:
            progress(_memory_of_floats(checkpoint, config))
        progress(f"loading {model_config.architectures[0] if model_config.architectures else model_config.model_type}")
        if shard is None:
            model = _read_whole(checkpoint, config)
            num_parameters = sum(parameter.numel() for parameter in model.parameters())
        else:
            model, num_parameters = shard.read(
                checkpoint.files, model_config, config, checkpoint.scaled, checkpoint.rename or str
            )
        mixers = describe(model)
    model.generation_config = checkpoint.meta.generation_config
    keep_latents(model)
    serve_as_decoder(model)
    if config.deterministic:
        compute_in_tiles(model)
    layers = probe_layers(model, model_config, {mixer.layer for mixer in mixers})
    info = _describe(model, checkpoint, config, num_parameters)
    progress(f"loaded {info.num_parameters / 1e6:.1f}M parameters, {info.dtype} on {info.device}")
    return LoadedModel(model, info, layers, mixers, shard, checkpoint.rename)


def digest_of(config: EngineConfig) -> str:
    """Digest of the checkpoint (`workers.model.digest`), which must have passed `load` or `check_checkpoint`."""
    path = Path(config.model)
    return digest(path / "config.json", check_files(path), config.digest_whole_bytes)


def reference_model(config: EngineConfig) -> Any:
    """Load the model with transformers' own attention, for passes over whole texts without KV. Raises: as `load`."""
    checkpoint = _check(config)
    with quiet_transformers():
        has_sdpa = getattr(type(checkpoint.meta), "_supports_sdpa", False)
        return _read_weights(checkpoint, config, attention="sdpa" if has_sdpa else "eager")


def num_layers_of(config: EngineConfig) -> int:
    """Number of layers, without reading weights. Raises: as `load`."""
    num: int = _check(config).model_config.num_hidden_layers
    return num


def check_checkpoint(config: EngineConfig) -> None:
    """Check everything that can be checked without reading the model's weights. Raises: as `load`."""
    checkpoint = _check(config)
    for adapter in starting_adapters(config):
        read_adapter(adapter, checkpoint.meta, rename=checkpoint.rename)


def survey(config: EngineConfig) -> ModelInfo:
    """Describe the model as `load` does, without reading weights.

    Misses problems that only a forward pass shows, such as a layer that misuses the attention interface.
    Raises: as `load`.
    """
    checkpoint = _check(config)
    num_parameters = sum(parameter.numel() for parameter in checkpoint.meta.parameters())
    return _describe(checkpoint.meta, checkpoint, config, num_parameters)


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """A checkpoint that has passed all checks that need no weights."""

    path: Path
    files: Sequence[Path]
    model_config: Any
    max_context: int
    limit: str
    """Why its context is shorter than the checkpoint's own; empty if it is not."""
    meta: Any
    """The model without weights."""
    rename: Rename | None
    """The model's names for stored tensors; None if they are the same."""
    scaled: ScaledWeights | None


def _check(config: EngineConfig) -> _Checkpoint:
    """Check the configuration, and names, types and shapes of all tensors. Every way of loading starts here."""
    path = Path(config.model)
    files = check_files(path)
    with quiet_transformers():
        read, scaled = read_config(path)
        contained = language_model(read)
        model_config, rename = contained.config, contained.rename
        check_architecture(model_config)
        if model_config.is_encoder_decoder:
            check_settings(model_config.model_type, config)
        max_context = context_limit(model_config, config, contained.max_tokens)
        if config.layers is not None:
            model_config, of_subset = _some_layers(model_config, config)
            rename = _both(rename, of_subset)
        if config.tensor_parallel > 1:
            ModelShard(0, config.tensor_parallel, config.expert_parallel).check(model_config)
        meta = _meta_model(path, model_config, config)
        check_recurrent(meta, model_config, config.tensor_parallel)
        check_stored(path, files, meta, rename or str, scaled)
    return _Checkpoint(path, files, model_config, max_context, contained.limit, meta, rename, scaled)


def _meta_model(path: Path, model_config: Any, config: EngineConfig) -> Any:
    """Build the model without weights, with its generation config. Raises: CheckpointError, UnsupportedModel."""
    try:
        model = meta_model(model_config, config.dtype)
    except Exception as error:  # the model's own code may raise anything
        raise UnsupportedModel(
            f"transformers cannot build the {model_config.model_type} of {path}: {cause(error)}"
        ) from error
    model.generation_config = read_generation_config(path) or model.generation_config
    _eos_token_ids(model)
    return model


def _some_layers(model_config: Any, config: EngineConfig) -> tuple[Any, Rename]:
    """Configuration of the model with only `config.layers`, and its names for stored tensors."""
    assert config.layers is not None
    subset = LayerSubset(config.layers)
    subset.check(model_config, config.model)
    name, _ = layer_list(meta_model(model_config, config.dtype))
    return subset.config_of(model_config), partial(subset.renamed, layers=name.rpartition(".")[2])


def _both(first: Rename | None, second: Rename) -> Rename:
    if first is None:
        return second
    return lambda name: None if (renamed := first(name)) is None else second(renamed)


def _read_whole(checkpoint: _Checkpoint, config: EngineConfig) -> Any:
    """Load the whole model; to a GPU tensor by tensor, so that it need not fit into the host's memory."""
    if torch.device(config.device).type != "cpu" and config.layers is None:
        try:
            return read_by_tensor(
                checkpoint.files, checkpoint.model_config, config, checkpoint.scaled, checkpoint.rename or str
            )
        except UnsupportedModel as reason:
            logger.info("the weights pass through the host's memory as a whole: %s", reason)
    return _read_weights(checkpoint, config)


def _read_weights(checkpoint: _Checkpoint, config: EngineConfig, attention: str = ATTENTION) -> Any:
    """Load by transformers. It gets tensors instead of files, because it requires more of an index file than we do."""
    model_config = checkpoint.model_config
    try:
        with open_tensors(checkpoint.files, checkpoint.rename or str, checkpoint.scaled) as tensors:
            model = class_of(model_config).from_pretrained(
                None,
                config=model_config,
                state_dict=tensors,
                dtype=getattr(torch, config.dtype),
                attn_implementation=attention,
            )
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"the weights in {checkpoint.path} are damaged or do not fit config.json: {first_line(error)}"
        ) from error
    return model.to(config.device).eval()


def _memory_of_floats(checkpoint: _Checkpoint, config: EngineConfig) -> str:
    """What dequantizing costs; said before it is paid."""
    assert checkpoint.scaled is not None
    num_parameters = sum(parameter.numel() for parameter in checkpoint.meta.parameters())
    num_bytes = num_parameters * getattr(torch, config.dtype).itemsize
    stored_bytes = sum(file.stat().st_size for file in checkpoint.files)
    return (
        f"{checkpoint.scaled.kinds} weights ({stored_bytes / 1e6:.0f} MB in files) are dequantized to {config.dtype}, "
        f"which takes {num_bytes / 1e6:.0f} MB over all ranks; activations are not quantized"
    )


def _describe(model: Any, checkpoint: _Checkpoint, config: EngineConfig, num_parameters: int) -> ModelInfo:
    path = checkpoint.path
    return ModelInfo(
        name=_name(path, config),
        architecture=type(model).__name__,
        dtype=config.dtype,
        device=config.device,
        num_parameters=num_parameters,
        vocab_size=min(1 + max(read_vocabulary(path)), model.get_input_embeddings().num_embeddings),
        max_context_tokens=checkpoint.max_context,
        kv_cache_tokens=config.kv_cache_tokens or 0,  # the runtime sets it
        eos_token_ids=_eos_token_ids(model),
        bos_token_id=getattr(checkpoint.model_config, "bos_token_id", None),
        layers=config.layers or (),
        **_of_source(model, checkpoint, config),
    )


def _of_source(model: Any, checkpoint: _Checkpoint, config: EngineConfig) -> dict[str, Any]:
    """Facts of an encoder-decoder that other models lack."""
    if not model.config.is_encoder_decoder:
        return {}
    return {
        "max_source_tokens": source_limit(checkpoint.model_config, config, checkpoint.max_context),
        "decoder_start": start_tokens(model),
    }


def _name(path: Path, config: EngineConfig) -> str:
    """The directory's name, followed by the layers if not all are loaded."""
    name = path.resolve().name
    return name if config.layers is None else f"{name}[{','.join(map(str, config.layers))}]"


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """Ids from generation_config.json, else from config.json. Raises: CheckpointError for other types."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = model.config.eos_token_id
    found = () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)
    if not all(isinstance(token_id, int) for token_id in found):
        raise CheckpointError(f"eos_token_id must be a token id or a list of them, got {ids!r}")
    return found
