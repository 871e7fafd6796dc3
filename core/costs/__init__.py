"""The cost of a forward pass, observed and estimated."""

from core.costs.engine_cost import NUM_RECENT, CostModel, EngineCost, PassCost
from core.costs.pass_law import PASS_LAWS, PassLaw

__all__ = ["NUM_RECENT", "PASS_LAWS", "CostModel", "EngineCost", "PassCost", "PassLaw"]
