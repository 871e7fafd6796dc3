"""Matrix products of linear layers on a GPU: joined if they share their input, in tiles of few rows."""

from workers.products.joined import join_projections
from workers.products.linear import use_tiles

__all__ = ["join_projections", "use_tiles"]
"""Importing this package registers the operator `outrider::product`."""
