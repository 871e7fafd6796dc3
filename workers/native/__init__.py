"""Native code of a CPU, compiled by Numba: products, operations on rows, attention, and threads that run them."""

from workers.native.vectors import HAS_PAIRS

__all__ = ["HAS_PAIRS"]
