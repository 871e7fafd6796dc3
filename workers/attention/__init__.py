"""The one attention function that models call, and its kernels."""

from workers.attention.paged import Kernel, PagedPlan, PagedStep
from workers.attention.paged_self_test import find_kernel
from workers.attention.seam import ATTENTION, Attention, LayerProbe

__all__ = ["ATTENTION", "Attention", "Kernel", "LayerProbe", "PagedPlan", "PagedStep", "find_kernel"]
