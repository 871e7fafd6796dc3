"""One rank's part of a model: what is split, which layers a stage has, and how they are read."""

from workers.model.shards.sharded_loader import ModelShard, read_by_tensor
from workers.model.shards.sharding import ROWS, VOCABULARY, ModuleShard
from workers.model.shards.stages import PipelineStage, is_elsewhere

__all__ = ["ROWS", "VOCABULARY", "ModelShard", "ModuleShard", "PipelineStage", "is_elsewhere", "read_by_tensor"]
