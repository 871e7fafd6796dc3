"""Heads: small networks that guess tokens from the hidden states of one target."""

from workers.heads.blockwise import BlockwiseHead
from workers.heads.files import HeadConfig, load_head, read_head, tapped_layers

__all__ = ["BlockwiseHead", "HeadConfig", "load_head", "read_head", "tapped_layers"]
