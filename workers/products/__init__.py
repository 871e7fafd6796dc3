"""Matrix products of linear layers on a GPU: fused if they share their input, in tiles of few rows."""

from workers.products.fused import fuse_projections
from workers.products.linear import product, use_tiles

__all__ = ["fuse_projections", "product", "use_tiles"]
"""Importing this package registers the operator `outrider::product`."""
