"""Mixtures of experts: read in parts, split over ranks, added up once a block, and computed in tiles."""

from workers.model.experts.parameter_shards import OWN_EXPERTS, ParameterShards, parameter_shards
from workers.model.experts.stacked import by_model_name, each_expert, is_made
from workers.model.experts.summed_blocks import summed_blocks
from workers.model.experts.tiled import compute_in_tiles, is_mixture

__all__ = [
    "OWN_EXPERTS",
    "ParameterShards",
    "by_model_name",
    "compute_in_tiles",
    "each_expert",
    "is_made",
    "is_mixture",
    "parameter_shards",
    "summed_blocks",
]
