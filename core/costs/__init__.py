"""What a forward pass costs, as observed and as believed."""

from core.costs.cost_model import Economy
from core.costs.engine_cost import EngineCost, PassCost
from core.costs.pass_law import PASS_LAWS, PassLaw

__all__ = ["PASS_LAWS", "Economy", "EngineCost", "PassCost", "PassLaw"]
