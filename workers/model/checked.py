"""Checks all of a checkpoint that can be checked without reading weights. Every way of loading starts here.

Knows files, configurations and models without weights. Must not know how weights are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from core.config import EngineConfig
from core.errors import CheckpointError, UnsupportedModel, cause
from workers.model.checkpoint import check_stored, meta_model, tensor_names
from workers.model.contained import (
    MTP_KINDS,
    LayerSubset,
    MtpLayer,
    Rename,
    find_mtp,
    language_model,
    layer_list,
    without_mtp,
)
from workers.model.encoder_decoder import check_settings
from workers.model.folder import check_files, quiet_transformers, read_config, read_generation_config
from workers.model.scaled import ScaledWeights
from workers.model.servable import check_architecture, check_recurrent, context_limit
from workers.model.shards import ModelShard, PipelineStage


@dataclass(frozen=True, slots=True)
class Checkpoint:
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
    mtp: MtpLayer | None = None
    """The layer if `config.model` is read for its MTP layer alone: `meta` and `rename` are then those of this layer."""
    joining: Rename | None = None
    """Returns the name in `JOINING` of an MTP layer's stored tensor."""


def check(config: EngineConfig, *, of_mtp: bool = False) -> Checkpoint:
    """Check the configuration, and names, types and shapes of all tensors; of the model, or of its MTP layer.

    Raises: StartupError.
    """
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
        mtp = joining = None
        if of_mtp:
            mtp = find_mtp(path, model_config, map(rename or str, tensor_names(files)))
            model_config, rename, joining = mtp.config, _both(rename, mtp.rename), _both(rename, mtp.joining)
        elif model_config.model_type in MTP_KINDS:
            names = map(rename or str, tensor_names(files))
            rename = _both(rename, without_mtp(names, model_config.num_hidden_layers))
        check_layers: Callable[[Any], None] = _nothing
        if config.layers is not None:
            model_config, of_subset, check_layers = _some_layers(model_config, config)
            rename = _both(rename, of_subset)
        if config.tensor_parallel > 1:
            ModelShard(0, config.tensor_parallel, config.expert_parallel).check(model_config)
        meta = _meta_model(path, model_config, config)
        check_recurrent(meta, model_config, config.num_ranks)
        PipelineStage(0, config.pipeline_parallel).check(meta)
        check_layers(meta)
        try:
            check_stored(path, files, meta, rename or str, scaled)
        except CheckpointError as error:
            raise (
                error if mtp is None else CheckpointError(f"the MTP layer, read as model.layers.0: {error}")
            ) from error
    return Checkpoint(path, files, model_config, max_context, contained.limit, meta, rename, scaled, mtp, joining)


def _meta_model(path: Path, model_config: Any, config: EngineConfig) -> Any:
    """Build the model without weights, with its generation config. Raises: CheckpointError, UnsupportedModel."""
    try:
        model = meta_model(model_config, config.dtype)
    except Exception as error:  # the model's own code may raise anything
        raise UnsupportedModel(
            f"transformers cannot build the {model_config.model_type} of {path}: {cause(error)}"
        ) from error
    model.generation_config = read_generation_config(path) or model.generation_config
    eos_token_ids(model)
    return model


def _nothing(_: Any) -> None:
    """Default of the check of layers."""


def _some_layers(model_config: Any, config: EngineConfig) -> tuple[Any, Rename, Callable[[Any], None]]:
    """Configuration of the model with only `config.layers`, its names for stored tensors, and its check once built."""
    assert config.layers is not None
    subset = LayerSubset(config.layers)
    subset.check(model_config, config.model)
    name, whole = layer_list(meta_model(model_config, config.dtype))
    renamed = partial(subset.renamed, layers=name.rpartition(".")[2])
    return subset.config_of(model_config), renamed, partial(subset.check_kept, whole)


def _both(first: Rename | None, second: Rename) -> Rename:
    if first is None:
        return second
    return lambda name: None if (renamed := first(name)) is None else second(renamed)


def eos_token_ids(model: Any) -> tuple[int, ...]:
    """Ids from generation_config.json, else from config.json. Raises: CheckpointError for other types."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = model.config.eos_token_id
    found = () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)
    if not all(isinstance(token_id, int) for token_id in found):
        raise CheckpointError(f"eos_token_id must be a token id or a list of them, got {ids!r}")
    return found
