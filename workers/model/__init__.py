"""Loads a checkpoint into a model that is ready to serve, whole or one rank's shard."""

from workers.model.checkpoint import tensor_names
from workers.model.contained import LayerSubset, MtpKind, has_mtp, layer_list
from workers.model.encoder_decoder import SourceDecoder, decoder_of
from workers.model.experts import is_mixture
from workers.model.folder import copy_settings, quiet_transformers
from workers.model.loader import (
    LoadedModel,
    check_checkpoint,
    check_mtp,
    digest_of,
    load,
    load_mtp,
    num_layers_of,
    reference_model,
    survey,
)
from workers.model.lora import LoraPair, LoraWeights, read_adapter, starting_adapters
from workers.model.outline import Outline, outline_of
from workers.model.servable import probe_layers
from workers.model.shards import ModelShard, PipelineStage

__all__ = [
    "LayerSubset",
    "LoadedModel",
    "LoraPair",
    "LoraWeights",
    "ModelShard",
    "MtpKind",
    "Outline",
    "PipelineStage",
    "SourceDecoder",
    "check_checkpoint",
    "check_mtp",
    "copy_settings",
    "decoder_of",
    "digest_of",
    "has_mtp",
    "is_mixture",
    "layer_list",
    "load",
    "load_mtp",
    "num_layers_of",
    "outline_of",
    "probe_layers",
    "quiet_transformers",
    "read_adapter",
    "reference_model",
    "starting_adapters",
    "survey",
    "tensor_names",
]
