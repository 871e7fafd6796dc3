"""From a checkpoint to a model that is ready to serve, whole or one rank's shard."""

from workers.model.layers import LayerSubset
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
from workers.model.sharded_loader import ModelShard

__all__ = [
    "LayerSubset",
    "LoadedModel",
    "ModelShard",
    "check_checkpoint",
    "digest_of",
    "load",
    "num_layers_of",
    "quiet_transformers",
    "reference_model",
    "survey",
]
