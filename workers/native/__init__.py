"""Native code of a CPU, compiled by Numba: products, operations on rows, attention, and threads that run them."""
