"""What a forward pass costs, as observed and as believed."""

from core.costs.engine_cost import CostModel, EngineCost, PassCost
from core.costs.pass_law import PASS_LAWS, PassLaw

__all__ = ["PASS_LAWS", "CostModel", "EngineCost", "PassCost", "PassLaw"]
