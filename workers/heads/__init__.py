"""Heads: small networks that guess tokens from the hidden states of one target."""

from workers.heads.blockwise import BlockwiseHead
from workers.heads.files import HeadConfig, load_head, read_head, tapped_layers
from workers.heads.returned import (
    MAX_SIBLINGS,
    CommittedRows,
    EngineHead,
    load_engine_head,
    read_features,
    read_guesses,
)

__all__ = [
    "MAX_SIBLINGS",
    "BlockwiseHead",
    "CommittedRows",
    "EngineHead",
    "HeadConfig",
    "load_engine_head",
    "load_head",
    "read_features",
    "read_guesses",
    "read_head",
    "tapped_layers",
]
