"""From a checkpoint to a model that is ready to serve, whole or one rank's slice."""

from workers.model.loader import LoadedModel, check_checkpoint, load, survey
from workers.model.sliced_loader import ModelSlice

__all__ = ["LoadedModel", "ModelSlice", "check_checkpoint", "load", "survey"]
