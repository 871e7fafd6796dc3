"""The cost of a forward pass, observed and estimated."""

from core.costs.engine_cost import CostModel, EngineCost
from core.costs.pass_cost import NUM_RECENT, PassCost
from core.costs.pass_law import PASS_LAWS, PassLaw
from core.costs.roofline import GPUS, Gpu, KVShape, ModelShape, Placed

__all__ = [
    "GPUS",
    "NUM_RECENT",
    "PASS_LAWS",
    "CostModel",
    "EngineCost",
    "Gpu",
    "KVShape",
    "ModelShape",
    "PassCost",
    "PassLaw",
    "Placed",
]
