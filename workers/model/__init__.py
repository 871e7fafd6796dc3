"""Loads a checkpoint into a model that is ready to serve, whole or one rank's shard."""

from workers.model.layers import LayerSubset, layer_list
from workers.model.loader import (
    LoadedModel,
    check_checkpoint,
    digest_of,
    load,
    num_layers_of,
    quiet_transformers,
    reference_model,
    survey,
)
from workers.model.lora import LoraPair, LoraWeights, read_adapter, starting_adapters
from workers.model.servable import probe_layers
from workers.model.sharded_loader import ModelShard

__all__ = [
    "LayerSubset",
    "LoadedModel",
    "LoraPair",
    "LoraWeights",
    "ModelShard",
    "check_checkpoint",
    "digest_of",
    "layer_list",
    "load",
    "num_layers_of",
    "probe_layers",
    "quiet_transformers",
    "read_adapter",
    "reference_model",
    "starting_adapters",
    "survey",
]
