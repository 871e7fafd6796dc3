"""Loads a checkpoint directory into a model that the runtime can serve, or raises one line that says why not.

Knows files; `workers.model.servable` knows which models can be served. Must not know the KV cache, sessions or
sampling. Weights are safetensors only, model code comes from transformers only, and nothing is downloaded:
`trust_remote_code` cannot be set.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from core.config import FP8_CAPABILITY, EngineConfig
from core.errors import CheckpointError, ConfigError, UnsupportedModel, first_line
from core.records import ModelInfo
from workers.attention import ATTENTION, keep_latents
from workers.model.checked import Checkpoint, check, eos_token_ids
from workers.model.checkpoint import open_tensors
from workers.model.contained import MtpKind, Rename
from workers.model.digest import digest
from workers.model.encoder_decoder import serve_as_decoder, start_tokens
from workers.model.experts import compute_in_tiles
from workers.model.folder import check_files, quiet_transformers
from workers.model.lora import read_adapter, starting_adapters
from workers.model.servable import class_of, probe_layers, source_limit
from workers.model.shards import ModelShard, read_by_tensor
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
    if config.num_ranks != (shard.num_ranks if shard else 1):
        name = "tensor_parallel" if config.tensor_parallel > 1 else "pipeline_parallel"
        raise ConfigError(f"{name} is {getattr(config, name)}, but this engine runs on its own")
    _check_kv_dtype(config)
    progress(f"reading {Path(config.model) / 'config.json'}")
    checkpoint = check(config)
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
    layers = shard.layers if shard is not None else None
    loaded = _prepared(model, checkpoint, config, num_parameters, mixers, layers)
    progress(f"loaded {num_parameters / 1e6:.1f}M parameters, {loaded.info.dtype} on {loaded.info.device}")
    return replace(loaded, shard=shard, rename=checkpoint.rename)


def _check_kv_dtype(config: EngineConfig) -> None:
    """Raises: ConfigError for a GPU that cannot compute with KV of this type. Only the engine's own process sees it."""
    if config.kv_dtype is None:
        return
    capability = torch.cuda.get_device_capability(config.device)
    if capability < FP8_CAPABILITY:
        least, found = (".".join(map(str, each)) for each in (FP8_CAPABILITY, capability))
        raise ConfigError(
            f"kv_dtype: {config.kv_dtype} needs a GPU of compute capability {least} or more, and "
            f"{torch.cuda.get_device_name(config.device)} has {found}: leave it out"
        )


def load_mtp(config: EngineConfig) -> tuple[LoadedModel, MtpKind, dict[str, Tensor]]:
    """Load the MTP layer of `config.model` as a model of one layer, and the tensors that join its inputs (`JOINING`).

    Nothing is read of the other layers. Raises: as `load`.
    """
    checkpoint = check(config, of_mtp=True)
    assert checkpoint.mtp is not None
    assert checkpoint.joining is not None
    with quiet_transformers():
        model = _read_whole(checkpoint, config)
    with open_tensors(checkpoint.files, checkpoint.joining, checkpoint.scaled) as stored:
        joining = {name: view[...].to(config.device, getattr(torch, config.dtype)) for name, view in stored.items()}
    num_parameters = sum(tensor.numel() for tensor in (*model.parameters(), *joining.values()))
    return _prepared(model, checkpoint, config, num_parameters), checkpoint.mtp.kind, joining


def check_mtp(config: EngineConfig) -> None:
    """Check everything about the MTP layer that can be checked without reading weights. Raises: as `load`."""
    check(config, of_mtp=True)


def _prepared(
    model: Any,
    checkpoint: Checkpoint,
    config: EngineConfig,
    num_parameters: int,
    mixers: tuple[Mixer, ...] = (),
    own_layers: range | None = None,
) -> LoadedModel:
    """The model as the runtime computes it. `own_layers`: those that it has, if not all."""
    model.generation_config = checkpoint.meta.generation_config
    keep_latents(model)
    serve_as_decoder(model)
    if config.deterministic:
        compute_in_tiles(model)
    layers = probe_layers(model, checkpoint.model_config, {mixer.layer for mixer in mixers}, own_layers)
    return LoadedModel(model, _describe(model, checkpoint, config, num_parameters), layers, mixers)


def digest_of(config: EngineConfig) -> str:
    """Digest of the checkpoint (`workers.model.digest`), which must have passed `load` or `check_checkpoint`."""
    path = Path(config.model)
    return digest(path / "config.json", check_files(path), config.digest_whole_bytes)


def reference_model(config: EngineConfig) -> Any:
    """Load the model with transformers' own attention, for passes over whole texts without KV. Raises: as `load`."""
    checkpoint = check(config)
    with quiet_transformers():
        has_sdpa = getattr(type(checkpoint.meta), "_supports_sdpa", False)
        return _read_weights(checkpoint, config, attention="sdpa" if has_sdpa else "eager")


def num_layers_of(config: EngineConfig) -> int:
    """Number of layers, without reading weights. Raises: as `load`."""
    num: int = check(config).model_config.num_hidden_layers
    return num


def check_checkpoint(config: EngineConfig) -> None:
    """Check everything that can be checked without reading the model's weights. Raises: as `load`."""
    checkpoint = check(config)
    for adapter in starting_adapters(config):
        read_adapter(adapter, checkpoint.meta, rename=checkpoint.rename)


def survey(config: EngineConfig) -> ModelInfo:
    """Describe the model as `load` does, without reading weights.

    Misses problems that only a forward pass shows, such as a layer that misuses the attention interface.
    Raises: as `load`.
    """
    checkpoint = check(config)
    num_parameters = sum(parameter.numel() for parameter in checkpoint.meta.parameters())
    return _describe(checkpoint.meta, checkpoint, config, num_parameters)


def _read_whole(checkpoint: Checkpoint, config: EngineConfig) -> Any:
    """Load the whole model; to a GPU tensor by tensor, so that it need not fit into the host's memory."""
    if torch.device(config.device).type != "cpu" and config.layers is None:
        try:
            return read_by_tensor(
                checkpoint.files, checkpoint.model_config, config, checkpoint.scaled, checkpoint.rename or str
            )
        except UnsupportedModel as reason:
            logger.info("the weights pass through the host's memory as a whole: %s", reason)
    return _read_weights(checkpoint, config)


def _read_weights(checkpoint: Checkpoint, config: EngineConfig, attention: str = ATTENTION) -> Any:
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


def _memory_of_floats(checkpoint: Checkpoint, config: EngineConfig) -> str:
    """Line that is logged before weights are dequantized: which weights, and how much memory they take."""
    assert checkpoint.scaled is not None
    num_parameters = sum(parameter.numel() for parameter in checkpoint.meta.parameters())
    num_bytes = num_parameters * getattr(torch, config.dtype).itemsize
    stored_bytes = sum(file.stat().st_size for file in checkpoint.files)
    return (
        f"{checkpoint.scaled.kinds} weights ({stored_bytes / 1e6:.0f} MB in files) are dequantized to {config.dtype}, "
        f"which takes {num_bytes / 1e6:.0f} MB over all ranks; activations are not quantized"
    )


def _describe(model: Any, checkpoint: Checkpoint, config: EngineConfig, num_parameters: int) -> ModelInfo:
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
        eos_token_ids=eos_token_ids(model),
        bos_token_id=getattr(checkpoint.model_config, "bos_token_id", None),
        layers=config.layers or (),
        **_of_source(model, checkpoint, config),
    )


def _of_source(model: Any, checkpoint: Checkpoint, config: EngineConfig) -> dict[str, Any]:
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
