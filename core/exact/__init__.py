"""The reference of what is exact: noise, sampling and verification, one row at a time, in numpy."""

from core.exact.acceptance import NEGLIGIBLE_MASS, Outcome
from core.exact.noise import Key, Purpose
from core.exact.sampling import TOP_P_SLACK

__all__ = ["NEGLIGIBLE_MASS", "TOP_P_SLACK", "Key", "Outcome", "Purpose"]
