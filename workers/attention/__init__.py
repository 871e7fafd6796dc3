"""The attention function that models call, and its kernels."""

from workers.attention.latent import keep_latents
from workers.attention.paged import Kernel, PagedPlan, inputs_in_shape, paged_inputs
from workers.attention.paged_self_test import find_difference, find_kernel
from workers.attention.seam import (
    ATTENTION,
    DISTANCES,
    READS_SOURCE,
    WHOLE_TEXT,
    Attention,
    LayerProbe,
    is_recorded,
    number_layers,
)

__all__ = [
    "ATTENTION",
    "DISTANCES",
    "READS_SOURCE",
    "WHOLE_TEXT",
    "Attention",
    "Kernel",
    "LayerProbe",
    "PagedPlan",
    "find_difference",
    "find_kernel",
    "inputs_in_shape",
    "is_recorded",
    "keep_latents",
    "number_layers",
    "paged_inputs",
]
