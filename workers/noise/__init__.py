"""Gumbel noise by key on any device, with the bits of `core.noise`: compiled loops on a CPU, one kernel on a GPU."""

from workers.noise.cpu_noise import largest_with_gumbel
from workers.noise.gumbel import gumbel_at, gumbel_rows, prepare_gumbel_rows
from workers.noise.noise_self_test import find_noise_kernel

__all__ = ["find_noise_kernel", "gumbel_at", "gumbel_rows", "largest_with_gumbel", "prepare_gumbel_rows"]
