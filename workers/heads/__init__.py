"""Heads: small networks that guess tokens from the hidden states of one target.

`returned` makes the guesses of a head in the target's engine. A head in a draft engine is run by
`workers.runtime.heads`.
"""

from workers.heads.eagle import EagleHead, load_eagle
from workers.heads.eagle_files import EagleConfig
from workers.heads.files import HeadConfig, check_head, load_head, read_head, tapped_layers
from workers.heads.fit import FittedHeads, fit_heads
from workers.heads.returned import (
    CommittedRows,
    EngineHead,
    PrefixFeatures,
    load_engine_head,
    read_features,
    read_guesses,
)
from workers.heads.state_heads import StateHeads

__all__ = [
    "CommittedRows",
    "EagleConfig",
    "EagleHead",
    "EngineHead",
    "FittedHeads",
    "HeadConfig",
    "PrefixFeatures",
    "StateHeads",
    "check_head",
    "fit_heads",
    "load_eagle",
    "load_engine_head",
    "load_head",
    "read_features",
    "read_guesses",
    "read_head",
    "tapped_layers",
]
