"""From a checkpoint to a model that is ready to serve, whole or one rank's shard."""

from workers.model.loader import LoadedModel, check_checkpoint, digest_of, load, survey
from workers.model.sharded_loader import ModelShard

__all__ = ["LoadedModel", "ModelShard", "check_checkpoint", "digest_of", "load", "survey"]
